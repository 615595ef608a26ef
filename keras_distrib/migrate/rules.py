"""What each name of TensorFlow becomes, as tables.

Names are written without the leading `tensorflow.`. A *prefix* rule renames a
module and what is in it. An *op* is a function whose arguments are translated
too. *Kept* names belong to `tf.data`, which stays TensorFlow's. A *reason* says
why a name has no counterpart and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

# The longest matching prefix counts; the new name must exist, or the old one is reported.
PREFIXES: dict[str, str] = {
    "config.LogicalDeviceConfiguration": "keras_distrib.config.LogicalDeviceConfiguration",
    "config.experimental.VirtualDeviceConfiguration": "keras_distrib.config.LogicalDeviceConfiguration",
    "config.LogicalDevice": "keras_distrib.config.LogicalDevice",
    "config.PhysicalDevice": "keras_distrib.config.PhysicalDevice",
    "config": "keras_distrib.config",
    "distribute": "keras_distrib",
    "distribute.experimental.CollectiveCommunication": "keras_distrib.experimental.CommunicationImplementation",
    "distribute.experimental.CollectiveHints": "keras_distrib.experimental.CommunicationOptions",
    "distribute.experimental.MultiWorkerMirroredStrategy": "keras_distrib.MultiWorkerMirroredStrategy",
    "errors.OutOfRangeError": "keras_distrib.errors.OutOfRangeError",
    "errors": "keras_distrib.errors",
    "function": "keras_distrib.function",
    "GradientTape": "keras_distrib.GradientTape",
    "initializers": "keras.initializers",
    "keras": "keras",
    "keras.callbacks.experimental": "keras.callbacks",
    "keras.experimental.CosineDecay": "keras.optimizers.schedules.CosineDecay",
    "keras.experimental.CosineDecayRestarts": "keras.optimizers.schedules.CosineDecayRestarts",
    "keras.layers.experimental.preprocessing": "keras.layers",
    "keras.optimizers.experimental": "keras.optimizers",
    "keras.optimizers.legacy": "keras.optimizers",
    "keras.preprocessing.image.load_img": "keras.utils.load_img",
    "keras.preprocessing.image.img_to_array": "keras.utils.img_to_array",
    "keras.preprocessing.image.array_to_img": "keras.utils.array_to_img",
    "keras.preprocessing.image.save_img": "keras.utils.save_img",
    "keras.preprocessing.image_dataset_from_directory": "keras.utils.image_dataset_from_directory",
    "keras.preprocessing.text_dataset_from_directory": "keras.utils.text_dataset_from_directory",
    "keras.preprocessing.timeseries_dataset_from_array": "keras.utils.timeseries_dataset_from_array",
    "keras.preprocessing.sequence.pad_sequences": "keras.utils.pad_sequences",
    "keras.utils.Sequence": "keras.utils.PyDataset",
    "keras.utils.experimental.DatasetCreator": "keras_distrib.DatasetCreator",
    "losses": "keras.losses",
    "metrics": "keras.metrics",
    "nn.compute_average_loss": "keras_distrib.compute_average_loss",
    "nn.scale_regularization_loss": "keras_distrib.scale_regularization_loss",
    "optimizers": "keras.optimizers",
    "Tensor": "torch.Tensor",
    "TensorSpec": "keras_distrib.TensorSpec",
    "train.Checkpoint": "keras_distrib.Checkpoint",
    "train.CheckpointManager": "keras_distrib.CheckpointManager",
    "train.latest_checkpoint": "keras_distrib.latest_checkpoint",
    "VariableAggregation": "keras_distrib.VariableAggregation",
    "VariableSynchronization": "keras_distrib.VariableSynchronization",
}

_SHORT = {
    "MSE": "mean_squared_error",
    "MAE": "mean_absolute_error",
    "MAPE": "mean_absolute_percentage_error",
    "MSLE": "mean_squared_logarithmic_error",
    "KLD": "kl_divergence",
}
PREFIXES |= {
    f"{module}.{name}": f"keras.{kind}.{new}"
    for kind in ("losses", "metrics")
    for module in (f"keras.{kind}", kind)
    for short, new in _SHORT.items()
    for name in (short, short.lower())
}

_DTYPES = "bfloat16 bool float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 complex64 complex128"
DTYPES: dict[str, str] = {name: f'"{name}"' for name in _DTYPES.split()} | {"half": '"float16"', "double": '"float64"'}
DTYPES |= {f"dtypes.{name}": value for name, value in DTYPES.items()}

_REDUCTIONS = {
    "NONE": "none",
    "SUM": "sum",
    "AUTO": "sum_over_batch_size",
    "SUM_OVER_BATCH_SIZE": "sum_over_batch_size",
}
REDUCTIONS: dict[str, str] = {
    f"{module}.Reduction.{name}": f'"{value}"'
    for module in ("keras.losses", "losses")
    for name, value in _REDUCTIONS.items()
}

# A constant and the expression that takes its place.
VALUES: dict[str, str] = DTYPES | REDUCTIONS


@dataclass(frozen=True)
class Parameter:
    """A parameter of TensorFlow's function.

    Attributes:
        name: its name there.
        new: its name here; None where it has no counterpart.
        left_out: it only labels, and is left out.
        needed: without it the function means something else.
    """

    name: str
    new: str | None
    left_out: bool = False
    needed: bool = False


@dataclass(frozen=True)
class Op:
    """A function and its arguments.

    Attributes:
        target: the function that takes its place.
        parameters: TensorFlow's parameters in order.
        rest: after how many parameters any number of positional arguments follows.
        adds: keyword arguments, as code, for defaults that differ.
    """

    target: str
    parameters: tuple[Parameter, ...]
    rest: int | None = None
    adds: tuple[tuple[str, str], ...] = ()


def _parameter(text: str) -> Parameter:
    """`a` keeps its name, `a:b` becomes b, `a!` has no counterpart, `a~` is left out, `a+` must be given."""
    mark = text[-1] if text[-1] in "!~+" else ""
    name, _, new = text.removesuffix(mark).partition(":")
    return Parameter(name, None if mark in ("!", "~") else new or name, mark == "~", mark == "+")


def _ops(text: str) -> dict[str, Op]:
    """Reads lines `names -> target: parameters [with name=value ...]`."""
    table = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        names, _, rule = line.partition(" -> ")
        target, _, arguments = rule.partition(": ")
        arguments, _, adds = arguments.partition(" with ")
        words = arguments.split()
        op = Op(
            target,
            tuple(_parameter(word) for word in words if word != "*"),
            words.index("*") if "*" in words else None,
            tuple((name, value) for name, _, value in (add.partition("=") for add in adds.split())),
        )
        table.update(dict.fromkeys(names.split("|"), op))
    return table


def _alike(names: str, modules: tuple[str, ...], parameters: str) -> str:
    """Lines for functions that have the same parameters: `tf_name` or `tf_name=new_name`."""
    lines = []
    for word in names.split():
        name, _, new = word.partition("=")
        aliases = "|".join(f"{module}{name}" for module in modules)
        lines.append(f"{aliases} -> keras.ops.{new or name}: {parameters}")
    return "\n".join(lines)


_MATH = ("", "math.")
_UNARY = """
    abs square sqrt exp sign negative round floor sin cos tan asin=arcsin acos=arccos atan=arctan sinh cosh tanh
    logical_not rsqrt log log1p expm1 ceil erf is_nan=isnan is_inf=isinf is_finite=isfinite asinh=arcsinh
    acosh=arccosh atanh=arctanh reciprocal conj
"""
_BINARY = """
    equal not_equal less less_equal greater greater_equal logical_and logical_or logical_xor maximum minimum add
    subtract multiply divide truediv=divide pow=power floordiv=floor_divide mod floormod=mod divide_no_nan
"""
_REDUCE = """
    reduce_sum=sum reduce_mean=mean reduce_max=max reduce_min=min reduce_prod=prod reduce_any=any reduce_all=all
    reduce_std=std reduce_variance=var reduce_logsumexp=logsumexp
"""
_ACTIVATIONS = "relu relu6 elu selu softsign"

OPS: dict[str, Op] = _ops(
    "\n".join(
        [
            _alike(_UNARY, _MATH, "x name~"),
            _alike(_BINARY, _MATH, "x:x1 y:x2 name~"),
            _alike(_REDUCE, _MATH, "input_tensor:x axis keepdims name~"),
            _alike(_ACTIVATIONS, ("nn.",), "features:x name~"),
        ]
    )
    + """
    atan2|math.atan2 -> keras.ops.arctan2: y:x1 x:x2 name~
    argmax|math.argmax -> keras.ops.argmax: input:x axis output_type! name~ with axis=0
    argmin|math.argmin -> keras.ops.argmin: input:x axis output_type! name~ with axis=0
    argsort -> keras.ops.argsort: values:x axis direction! stable! name~
    broadcast_to -> keras.ops.broadcast_to: input:x shape name~
    cast|dtypes.cast -> keras.ops.cast: x dtype name~
    clip_by_value -> keras.ops.clip: t:x clip_value_min:x_min clip_value_max:x_max name~
    concat -> keras.ops.concatenate: values:xs axis name~
    cond -> keras.ops.cond: pred true_fn+ false_fn+ name~
    convert_to_tensor -> keras.ops.convert_to_tensor: value:x dtype dtype_hint! name~
    cumsum|math.cumsum -> keras.ops.cumsum: x axis exclusive! reverse! name~ with axis=0
    einsum|linalg.einsum -> keras.ops.einsum: equation:subscripts * name~
    expand_dims -> keras.ops.expand_dims: input:x axis name~
    eye|linalg.eye -> keras.ops.eye: num_rows:N num_columns:M batch_shape! dtype name~
    fill -> keras.ops.full: dims:shape value:fill_value name~ layout!
    gather -> keras.ops.take: params:x indices validate_indices! axis batch_dims! name~ with axis=0
    identity -> keras.ops.copy: input:x name~
    is_tensor -> keras.ops.is_tensor: x
    linalg.cholesky -> keras.ops.cholesky: input:x name~
    linalg.det -> keras.ops.det: input:x name~
    linalg.inv -> keras.ops.inv: input:x adjoint! name~
    linspace -> keras.ops.linspace: start stop num name~ axis
    map_fn -> keras.ops.map: fn:f elems:xs dtype! parallel_iterations~ back_prop! swap_memory~ infer_shape! name~ \
fn_output_signature!
    math.in_top_k|nn.in_top_k -> keras.ops.in_top_k: targets predictions k name~
    math.segment_sum -> keras.ops.segment_sum: data segment_ids name~
    math.top_k|nn.top_k -> keras.ops.top_k: input:x k sorted index_type! name~ with k=1
    matmul|linalg.matmul -> keras.ops.matmul: a:x1 b:x2 transpose_a! transpose_b! adjoint_a! adjoint_b! a_is_sparse! \
b_is_sparse! output_type! grad_a! grad_b! name~
    name_scope -> keras.name_scope: name
    nn.dropout -> keras.random.dropout: x:inputs rate noise_shape seed! name~
    nn.embedding_lookup -> keras.ops.take: params:x ids:indices max_norm! name~ with axis=0
    nn.gelu -> keras.ops.gelu: features:x approximate name~ with approximate=False
    nn.leaky_relu -> keras.ops.leaky_relu: features:x alpha:negative_slope name~
    nn.log_softmax|math.log_softmax -> keras.ops.log_softmax: logits:x axis name~
    nn.moments -> keras.ops.moments: x axes shift! keepdims name~
    nn.sigmoid_cross_entropy_with_logits -> keras.ops.binary_crossentropy: labels:target logits:output name~ \
with from_logits=True
    nn.silu|nn.swish -> keras.ops.silu: features:x beta!
    nn.softmax|math.softmax -> keras.ops.softmax: logits:x axis name~
    nn.softmax_cross_entropy_with_logits -> keras.ops.categorical_crossentropy: labels:target logits:output axis name~ \
with from_logits=True
    nn.softplus|math.softplus -> keras.ops.softplus: features:x name~
    nn.sparse_softmax_cross_entropy_with_logits -> keras.ops.sparse_categorical_crossentropy: labels:target \
logits:output name~ with from_logits=True
    norm|linalg.norm -> keras.ops.norm: tensor:x ord! axis keepdims name~
    one_hot -> keras.ops.one_hot: indices:x depth:num_classes on_value! off_value! axis dtype name~
    ones -> keras.ops.ones: shape dtype name~ layout!
    ones_like -> keras.ops.ones_like: input:x dtype name~ layout!
    pad -> keras.ops.pad: tensor:x paddings:pad_width mode! constant_values name~
    random.categorical -> keras.random.categorical: logits num_samples dtype seed! name~
    random.normal -> keras.random.normal: shape mean stddev dtype seed! name~
    random.set_seed -> keras.utils.set_random_seed: seed
    random.shuffle -> keras.random.shuffle: value:x seed! name~
    random.truncated_normal -> keras.random.truncated_normal: shape mean stddev dtype seed! name~
    rank -> keras.ops.ndim: input:x name~
    repeat -> keras.ops.repeat: input:x repeats axis name~
    reshape -> keras.ops.reshape: tensor:x shape:newshape name~
    reverse -> keras.ops.flip: tensor:x axis name~
    roll -> keras.ops.roll: input:x shift axis name~
    scatter_nd -> keras.ops.scatter: indices updates:values shape bad_indices_policy! name~
    shape -> keras.ops.shape: input:x out_type! name~
    sigmoid|nn.sigmoid|math.sigmoid -> keras.ops.sigmoid: x name~
    size -> keras.ops.size: input:x out_type! name~
    slice -> keras.ops.slice: input_:inputs begin:start_indices size:shape name~
    sort -> keras.ops.sort: values:x axis direction! name~
    squeeze -> keras.ops.squeeze: input:x axis name~
    stack -> keras.ops.stack: values:x axis name~
    stop_gradient -> keras.ops.stop_gradient: input:variable name~
    nn.tanh -> keras.ops.tanh: x name~
    tensor_scatter_nd_update -> keras.ops.scatter_update: tensor:inputs indices updates name~
    tensordot|linalg.tensordot -> keras.ops.tensordot: a:x1 b:x2 axes name~
    tile -> keras.ops.tile: input:x multiples:repeats name~
    transpose -> keras.ops.transpose: a:x perm:axes conjugate! name~
    unstack -> keras.ops.unstack: value:x num axis name~
    vectorized_map -> keras.ops.vectorized_map: fn:function elems:elements fallback_to_while_loop~ warn~
    where -> keras.ops.where: condition x:x1+ y:x2+ name~
    while_loop -> keras.ops.while_loop: cond body loop_vars shape_invariants! parallel_iterations~ back_prop! \
swap_memory~ maximum_iterations name~
    zeros -> keras.ops.zeros: shape dtype name~ layout!
    zeros_like -> keras.ops.zeros_like: input:x dtype name~ layout!
    add_n|math.add_n -> sum: inputs:iterable name~
    split -> keras.ops.split: value:x num_or_size_splits:indices_or_sections axis num! name~
    constant -> keras.ops.convert_to_tensor: value:x dtype shape! name~
    random.uniform -> keras.random.uniform: shape minval maxval dtype seed! name~
    Variable -> keras.Variable: initial_value:initializer trainable validate_shape! caching_device! name \
variable_def! dtype import_scope! constraint! synchronization aggregation shape! experimental_enable_variable_lifting!
    print -> print: * output_stream:file summarize~ sep end name~
    real|math.real -> keras.ops.real: input:x name~
    imag|math.imag -> keras.ops.imag: input:x name~
    range -> keras.ops.arange: start limit:stop delta:step dtype name~
    config.list_physical_devices|config.experimental.list_physical_devices -> \
keras_distrib.config.list_physical_devices: device_type:kind
    config.list_logical_devices|config.experimental.list_logical_devices -> \
keras_distrib.config.list_logical_devices: device_type:kind
    config.set_logical_device_configuration|config.experimental.set_virtual_device_configuration -> \
keras_distrib.config.set_logical_device_configuration: device logical_devices
    keras.layers.experimental.SyncBatchNormalization -> keras.layers.BatchNormalization: axis momentum epsilon center \
scale beta_initializer gamma_initializer moving_mean_initializer moving_variance_initializer beta_regularizer \
gamma_regularizer beta_constraint gamma_constraint name with synchronized=True
""".replace("-> \\\n", "-> ")
)
# Keras 2's backend functions that take the same arguments as those of keras.ops.
_BACKEND = """
    abs all any argmax argmin cast clip concatenate dot=dot equal exp expand_dims=expand_dims log max maximum mean min
    minimum ones_like pow=power prod reshape round shape sigmoid sign sin softmax softplus sqrt square squeeze stack std
    stop_gradient sum tanh transpose var zeros_like
"""
BACKEND: dict[str, str] = {
    f"keras.backend.{name}": f"keras.ops.{new or name}"
    for name, _, new in (word.partition("=") for word in _BACKEND.split())
}

# What stays TensorFlow's: a tf.data pipeline, and what is used for one.
KEPT: tuple[str, ...] = ("data", "io", "image", "strings", "RaggedTensor", "ragged", "RaggedTensorSpec", "AUTOTUNE")

# Methods whose arguments, and functions given to them, belong to the pipeline of a dataset.
DATASET_METHODS = frozenset(
    [
        "map",
        "filter",
        "flat_map",
        "interleave",
        "padded_batch",
        "ragged_batch",
        "scan",
        "take_while",
        "group_by_window",
        "bucket_by_sequence_length",
        "with_options",
        "from_generator",
        "from_tensor_slices",
        "from_tensors",
    ]
)

# Statements that are taken out, and why they can be.
REMOVED: dict[str, str] = {
    "config.experimental.set_memory_growth": "not needed: torch allocates memory as it needs it",
    "config.gpu.set_per_process_memory_growth": "not needed: torch allocates memory as it needs it",
}

_ORDER = "statements run in the order they are written: take it out"
_GRAPH = "there is no graph: take it out"
_TPU = "there are no TPUs here"
_DEVICES = "pass `devices=` to the strategy, or set CUDA_VISIBLE_DEVICES"
# The longest matching prefix counts.
REASONS: dict[str, str] = {
    "__version__": "print `keras.__version__` or `torch.__version__`",
    "autograph": _GRAPH,
    "boolean_mask": "write `x[mask]`",
    "clip_by_global_norm": "give the optimizer `global_clipnorm=`, which clips the summed gradients",
    "clip_by_norm": "give the optimizer `clipnorm=`, which clips the summed gradients",
    "compat": "TensorFlow 1's names have no counterpart: write it for TensorFlow 2 first",
    "config.experimental_connect_to_cluster": _TPU,
    "config.get_visible_devices": _DEVICES,
    "config.optimizer": "torch has its own compiler: see `jit_compile` of `compile` and `torch.compile`",
    "config.run_functions_eagerly": "not needed: every function runs eagerly, unless compiled by `jit_compile`",
    "config.set_soft_device_placement": "take it out: a replica's step is placed by its strategy",
    "config.set_visible_devices": _DEVICES,
    "config.threading": "call `torch.set_num_threads` or `torch.set_num_interop_threads`",
    "control_dependencies": _ORDER,
    "debugging": "write an `if` that raises, or `torch._assert`",
    "device": 'write `keras.device("gpu:0")`; in a strategy, replicas are placed by it',
    "distribute.experimental.TPUStrategy": _TPU,
    "distribute.TPUStrategy": _TPU,
    "distribute.cluster_resolver.TPUClusterResolver": _TPU,
    "errors": "catch the Python or torch error that is raised instead",
    "estimator": "estimators have no counterpart: write a Keras model",
    "executing_eagerly": "it is always true here",
    "feature_column": "use Keras' preprocessing layers",
    "group": _ORDER,
    "keras.backend.get_value": "write `keras.ops.convert_to_numpy(x)`",
    "keras.backend.set_value": "write `variable.assign(value)`; for a learning rate `optimizer.learning_rate = value`",
    "keras.utils.multi_gpu_model": "make the model in the scope of a `keras_distrib.MirroredStrategy`",
    "Module": "derive from `keras.layers.Layer` or `torch.nn.Module`",
    "nn.l2_loss": "write `0.5 * keras.ops.sum(keras.ops.square(x))`",
    "no_op": "take it out",
    "numpy_function": "call the function",
    "py_function": "call the function",
    "python": "TensorFlow's private modules have no counterpart: import the public name first",
    "random.Generator": "use `keras.random.SeedGenerator`",
    "saved_model": 'save with `model.save("name.keras")`, or `model.export` for serving',
    "string": "torch has no tensors of strings",
    "summary": "use `keras.callbacks.TensorBoard`, or `torch.utils.tensorboard.SummaryWriter`",
    "test": "use pytest or unittest",
    "TensorShape": "write a tuple",
    "tpu": _TPU,
    "train": "use Keras' optimizers and callbacks, and `keras_distrib.Checkpoint`",
}
NO_REASON = "it has no counterpart in keras or keras_distrib"

# Methods by name, since the type of what they are called on is not known.
METHOD_RENAMES: dict[str, str] = {
    "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
    "experimental_make_numpy_dataset": "make_experimental_numpy_dataset",
    "experimental_run_v2": "run",
    "reset_states": "reset_state",
}
METHOD_REASONS: dict[str, str] = {
    "as_list": "a shape is a tuple here: write `list(x.shape)`",
    "batch_jacobian": "use `torch.func.jacrev`",
    "evaluate_generator": "call `evaluate`",
    "fit_generator": "call `fit`",
    "get_shape": "write `x.shape`",
    "jacobian": "use `torch.func.jacrev`",
    "minimize": "compute gradients with `keras_distrib.GradientTape`, then call `apply_gradients`",
    "predict_generator": "call `predict`",
    "read_value": "write `variable.value`, or `variable.numpy()`",
    "set_shape": "take it out: shapes are always known",
    "stop_recording": "use `torch.no_grad()`",
    "watched_variables": "torch does not list them: use the model's `trainable_variables`",
}
_LOADING = "a `keras.utils.PyDataset` takes it in its constructor"
METHOD_KEYWORDS: dict[str, dict[str, str]] = {
    "apply_gradients": {
        "experimental_aggregate_gradients": "call it in `with keras_distrib.skip_gradients_aggregation():`",
        "skip_gradients_aggregation": "call it in `with keras_distrib.skip_gradients_aggregation():`",
    },
    "compile": {
        "experimental_run_tf_function": "take it out",
        "experimental_steps_per_execution": "name it `steps_per_execution`",
        "sample_weight_mode": "pass weights of the shape of the loss",
    },
    "fit": dict.fromkeys(("workers", "use_multiprocessing", "max_queue_size"), _LOADING),
    "evaluate": dict.fromkeys(("workers", "use_multiprocessing", "max_queue_size"), _LOADING),
    "predict": dict.fromkeys(("workers", "use_multiprocessing", "max_queue_size"), _LOADING),
    "save": {"save_format": "the format follows from the file's name, which ends in `.keras`"},
    "save_weights": {"save_format": "the format follows from the file's name, which ends in `.weights.h5`"},
}
# Keyword arguments of Keras' optimizers.
OPTIMIZER_RENAMES: dict[str, str] = {"lr": "learning_rate"}
OPTIMIZER_REASONS: dict[str, str] = {
    "decay": "pass a schedule of `keras.optimizers.schedules` as `learning_rate`",
}

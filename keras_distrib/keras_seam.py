"""The one module that imports `keras.src` or patches Keras.

Everything else in the package takes Keras' internals from here, so that a new
Keras release is met in one place. `install` puts the hooks in, once per
process, and they stay: several of them cannot be taken out again without
breaking Keras. Outside of a strategy's scope and of its models every hook hands
straight through to Keras' own code.
"""

# Keras has no annotations, and this module touches what it does not publish.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

HOW_TO_SET_BACKEND = (
    'Set the environment variable KERAS_BACKEND=torch (or `os.environ["KERAS_BACKEND"] = "torch"`) '
    "before the first import of keras or keras_distrib."
)

if "keras" not in sys.modules:  # Keras' own default is TensorFlow
    os.environ.setdefault("KERAS_BACKEND", "torch")

try:
    import keras
except ImportError as error:
    raise ImportError(
        f"keras_distrib needs Keras 3 on the PyTorch backend, and importing keras failed: {error}. "
        + HOW_TO_SET_BACKEND
    ) from error

if keras.backend.backend() != "torch":
    raise ImportError(
        f"keras_distrib needs Keras on the PyTorch backend. Received: backend={keras.backend.backend()!r}. "
        + HOW_TO_SET_BACKEND
    )

from keras.src import backend as _backend
from keras.src.backend.common import global_state as _global_state, variables as _variables_module
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.torch import (
    random as _random_module,
    trainer as _torch_trainer,
)
from keras.src.layers.layer import Layer as _Layer
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell as _DropoutRNNCell
from keras.src.layers.rnn.rnn import RNN as _RNN
from keras.src.losses import loss as _loss_module
from keras.src.losses.losses import LossFunctionWrapper as _LossFunctionWrapper
from keras.src.models import model as _model_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random import seed_generator as _seed_module
from keras.src.saving import saving_lib as _saving
from keras.src.saving.keras_saveable import KerasSaveable as _KerasSaveable
from keras.src.trainers import trainer as _base_trainer
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import (
    class_weight_to_sample_weights,
    unpack_x_y_sample_weight,
)
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
from keras.src.utils import (
    io_utils as _io_utils,
    naming as _naming,
    torch_utils as _torch_utils,
)
from keras.src.utils.naming import auto_name
from keras.src.utils.tracking import Tracker as _Tracker

try:  # Keras 3.16 moved the backend's tensor functions
    from keras.src.backend.torch.ops import core as _torch_core
except ImportError:
    from keras.src.backend.torch import core as _torch_core

__all__ = [
    "BaseOptimizer",
    "BaseTrainer",
    "DataAdapter",
    "Hooks",
    "StatelessScope",
    "TorchDataLoaderAdapter",
    "Trainer",
    "Variable",
    "auto_name",
    "class_weight_to_sample_weights",
    "convert_to_tensor",
    "device",
    "epsilon",
    "get_device",
    "get_stateless_scope",
    "install",
    "name_scope",
    "ops",
    "unpack_x_y_sample_weight",
]

Variable = keras.Variable
StatelessScope = keras.StatelessScope
device = keras.device
name_scope = keras.name_scope
ops: Any = keras.ops
convert_to_tensor: Callable[..., torch.Tensor] = _torch_core.convert_to_tensor
get_device = _torch_core.get_device
epsilon: Callable[[], float] = keras.config.epsilon
Trainer = getattr(_torch_trainer, "TorchTrainer", None) or _torch_trainer.Trainer  # renamed in Keras 3.16
BaseTrainer = getattr(_base_trainer, "BaseTrainer", None) or _base_trainer.Trainer  # renamed in Keras 3.16

original_reduce_weighted_values = _loss_module.reduce_weighted_values
apply_mask: Any = _loss_module.apply_mask
squeeze_or_expand_to_same_rank: Any = _loss_module.squeeze_or_expand_to_same_rank

# Keras' state of one thread that must not reach a replica's thread: each replica
# has its own of these, or none.
_PER_REPLICA_ATTRIBUTES = (
    "stateless_scope",
    "symbolic_scope",
    "current_call_ctx",
    "uninitialized_variables",
    _seed_module.GLOBAL_SEED_GENERATOR,
)


@dataclass(frozen=True)
class Hooks:
    """What `install` asks of the package; each is called in Keras' place.

    Attributes:
        new_variable: `(cls, args, kwargs)` to the object that `cls(...)` makes,
            or None for Keras' own.
        trainer: trainer class to put in front of Keras' own.
        compile: `(model, original, kwargs)` in place of `Trainer.compile`.
        apply: `(optimizer, original, grads, variables)` in place of `apply`.
        maybe_build: `(layer, original)` in place of building an unbuilt layer.
        reduce_loss: `(values, sample_weight, mask, reduction, dtype)` in place of
            `reduce_weighted_values`.
        loss_call: `(loss, original, y_true, y_pred, sample_weight)` in place of a
            `Loss` object's call.
        scalar_weight: the weight in a `Mean` or `Sum` metric of a scalar that a
            step gives without one; None leaves it to Keras.
        moments: `(layer, original, inputs, mask)` in place of
            `BatchNormalization._moments`.
        call_torch_module: `(wrapper, original, args, training, kwargs)` in place
            of `TorchModuleWrapper.call`.
        layer_attributes: where a layer's attributes of one call are kept in the
            calling replica, by layer and name; None outside of one.
        keep_attribute: `(layer, name)` notes an attribute that a step sets, whose
            first replica's value stays when the run ends.
        dropout_generator: the calling replica's generator for unseeded dropout on
            a device, or None outside of one.
        layer_losses: the list that holds a layer's `add_loss` values in the
            calling replica, or None outside of one.
        fold_seed: `(seed)` to this replica's own seed.
        captured_cond: `(original, pred, true_fn, false_fn)` in place of `ops.cond`.
        captured_generator: `(seed)` to the generator that stands for one seeded so, in
            a step that is being traced; None elsewhere.
        is_being_built: `(layer)` whether a replica is building the layer.
        in_replica: whether the calling thread runs a replica's step.
        state_dict: `(layer, state)` to what torch's `state_dict` is to give.
        loading_state: `(layer)` to a context manager in which torch's
            `load_state_dict` writes the layer's tensors.
        outside_strategies: context manager in which variables are Keras' own.
        synchronize: `(model)` before its graph is taken.
        adapt_data: `(x, arguments)` to what stands in for `x` in an iterator over epochs.
        scope_of: `(variables)` to a context manager that enters the scope of the
            strategy that made them, outside of any.
        scope_of_model: `(model)`, likewise for the strategy that the model belongs to.
    """

    new_variable: Callable[[type, tuple[Any, ...], dict[str, Any]], Any | None]
    trainer: type
    compile: Callable[[Any, Callable[..., None], dict[str, Any]], None]
    apply: Callable[[Any, Callable[..., Any], Any, Any], Any]
    maybe_build: Callable[[Any, Callable[[], None]], None]
    reduce_loss: Callable[..., Any]
    loss_call: Callable[..., Any]
    scalar_weight: Callable[[], float | None]
    moments: Callable[..., Any]
    call_torch_module: Callable[..., Any]
    layer_attributes: Callable[[], dict[tuple[int, str], Any] | None]
    keep_attribute: Callable[[Any, str], None]
    dropout_generator: Callable[[torch.device], torch.Generator | None]
    layer_losses: Callable[[Any], list[Any] | None]
    fold_seed: Callable[[Any], Any]
    captured_cond: Callable[..., Any]
    captured_generator: Callable[[Any], torch.Generator | None]
    is_being_built: Callable[[Any], bool]
    in_replica: Callable[[], bool]
    state_dict: Callable[[Any, dict[str, Any]], dict[str, Any]]
    loading_state: Callable[[Any], contextlib.AbstractContextManager[Any]]
    outside_strategies: Callable[[], contextlib.AbstractContextManager[Any]]
    synchronize: Callable[[Any], None]
    adapt_data: Callable[[Any, dict[str, Any]], Any]
    scope_of: Callable[[Any], contextlib.AbstractContextManager[Any]]
    scope_of_model: Callable[[Any], contextlib.AbstractContextManager[Any]]


_installed = False
_install_lock = threading.Lock()


def install(hooks: Hooks) -> None:
    """Puts the hooks into Keras; a second call does nothing."""
    global _installed
    with _install_lock:
        if _installed:
            return
        _install_variables(hooks)
        _install_trainer(hooks)
        _install_optimizers(hooks)
        _install_layers(hooks)
        _install_layers_with_state(hooks)
        _install_state_dicts(hooks)
        _install_losses(hooks)
        _install_metrics(hooks)
        _install_seeds(hooks)
        _installed = True


def _install_variables(hooks: Hooks) -> None:
    # Layers, optimizers, metrics and seed generators all create their state through
    # `backend.Variable(...)`, and `__new__` is the one point that they all pass.
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = hooks.new_variable(cls, args, kwargs)
        return object.__new__(cls) if made is None else made

    _backend.Variable.__new__ = staticmethod(new)


def _install_trainer(hooks: Hooks) -> None:
    # In front of Keras' trainer, behind the user's class: a user's `train_step` still wins.
    model = _model_module.Model
    model.__bases__ = (hooks.trainer, *model.__bases__)
    # `Model.__init__` calls the trainer's `__init__` by this name.
    _model_module.Trainer = hooks.trainer

    # `compile_from_config` compares a model's `compile` with this one to see whether the
    # user overrode it, so it is replaced in place, not overridden in a subclass.
    original = BaseTrainer.compile

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        hooks.compile(self, functools.partial(original, self, *args), kwargs)

    BaseTrainer.compile = compile

    # A model that is built outside of its scope is still of its strategy.
    def in_scope(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def build(self: Any, *args: Any, **kwargs: Any) -> Any:
            with hooks.scope_of_model(self):
                return original(self, *args, **kwargs)

        return build

    _wrap_everywhere(model, "build", in_scope)

    # Every entry point makes one of these from its `x`.
    original_iterator = _torch_trainer.TorchEpochIterator

    class EpochIterator(original_iterator):  # type: ignore[misc, valid-type]
        def __init__(self, x: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(hooks.adapt_data(x, kwargs), *args, **kwargs)

        def _interrupted_warning(self) -> None:
            # The end of a dataset of unknown length is no interruption.
            if self.steps_per_epoch or not getattr(self.data_adapter, "ends_by_itself", False):
                super()._interrupted_warning()

    _torch_trainer.TorchEpochIterator = EpochIterator

    # Tracing would take the mean over replicas, which reading gives, into the graph.
    original_export = model.export

    @functools.wraps(original_export)
    def export(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks.synchronize(self)
        return original_export(self, *args, **kwargs)

    model.export = export


def _install_optimizers(hooks: Hooks) -> None:
    # Gradients are summed at the outermost `apply`: under `LossScaleOptimizer` the inner
    # one would come after a look at one replica's own gradients. So each class's own
    # `apply` is wrapped, those of classes still to be defined included.
    def summing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            return hooks.apply(self, functools.partial(original, self), grads, trainable_variables)

        return apply

    _wrap_everywhere(BaseOptimizer, "apply", summing)

    # Callbacks and users build optimizers outside of the scope: slots go with their variables.
    def building(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def build(self: Any, var_list: Any) -> Any:
            with hooks.scope_of(var_list):
                return original(self, var_list)

        return build

    _wrap_everywhere(BaseOptimizer, "build", building)


def _wrap_everywhere(base: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps a method of a class and of all its subclasses, those still to be defined included."""

    def wrap(cls: type) -> None:
        original = cls.__dict__.get(name)
        if callable(original) and not getattr(original, "_keras_distrib", False):
            wrapped: Any = wrapper(original)
            wrapped._keras_distrib = True
            setattr(cls, name, wrapped)

    def wrap_tree(cls: type) -> None:
        wrap(cls)
        for subclass in cls.__subclasses__():
            wrap_tree(subclass)

    before = base.__dict__.get("__init_subclass__")

    def init_subclass(cls: type, **kwargs: Any) -> None:
        if before is None:
            super(base, cls).__init_subclass__(**kwargs)
        else:
            before.__get__(None, cls)(**kwargs)
        wrap(cls)

    base.__init_subclass__ = classmethod(init_subclass)
    wrap_tree(base)


def _install_layers(hooks: Hooks) -> None:
    # Replica threads share layer objects. Keras keeps the identities of `add_loss` values
    # on the layer, so one replica's call would clear the others' losses.
    original_add_loss = _Layer.add_loss
    original_get_own_losses = _Layer._get_own_losses
    original_clear_losses = _Layer._clear_losses
    original_maybe_build = _Layer._maybe_build

    @functools.wraps(original_add_loss)
    def add_loss(self: Any, loss: Any) -> None:
        own = hooks.layer_losses(self)
        if own is None:
            original_add_loss(self, loss)
        else:
            own.extend(keras.tree.flatten(loss))

    def get_own_losses(self: Any) -> list[Any]:
        own = hooks.layer_losses(self)
        return original_get_own_losses(self) if own is None else own[:]

    def clear_losses(self: Any) -> None:
        own = hooks.layer_losses(self)
        if own is None:
            original_clear_losses(self)
        else:
            own.clear()
            for layer in self._layers:
                layer._clear_losses()

    # Two replica threads in one layer's first call would each build it.
    def maybe_build(self: Any, call_spec: Any) -> None:
        if not self.built or hooks.is_being_built(self):
            hooks.maybe_build(self, functools.partial(original_maybe_build, self, call_spec))

    # Replicas that build the same metric get the same variables, and would each add them.
    original_add_to_store = _Tracker.add_to_store

    def add_to_store(self: Any, store_name: str, value: Any) -> None:
        if not (self.is_in_store(store_name, value) and hooks.in_replica()):
            original_add_to_store(self, store_name, value)

    _Tracker.add_to_store = add_to_store
    _Layer.add_loss = add_loss
    _Layer._get_own_losses = get_own_losses
    _Layer._clear_losses = clear_losses
    _Layer._maybe_build = maybe_build


def _install_layers_with_state(hooks: Hooks) -> None:
    # Keras refuses `synchronized=True` on torch; here it means all replicas.
    norm: Any = keras.layers.BatchNormalization
    original_init, original_moments = norm.__init__, norm._moments

    signature = inspect.signature(original_init)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        synchronized = bound.arguments.pop("synchronized", False)
        original_init(*bound.args, **bound.kwargs)
        self.synchronized = bool(synchronized)

    init.__signature__ = signature  # Keras reads a layer's arguments from it
    init.__doc__ = original_init.__doc__

    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        return hooks.moments(self, functools.partial(original_moments, self, inputs, mask), inputs, mask)

    norm.__init__, norm._moments = init, moments

    # The vector of the power iteration depends on the weights alone.
    spectral: Any = keras.layers.SpectralNormalization
    original_build = spectral.build

    @functools.wraps(original_build)
    def build(self: Any, input_shape: Any) -> None:
        original_build(self, input_shape)
        self.vector_u.writes_are_equal = self.kernel.writes_are_equal = True

    spectral.build = build

    # A torch module holds its parameters itself.
    wrapper: Any = _torch_utils.TorchModuleWrapper
    original_call = wrapper.call

    @functools.wraps(original_call)
    def call(self: Any, *args: Any, training: Any = None, **kwargs: Any) -> Any:
        original = functools.partial(original_call, self, *args, training=training, **kwargs)
        return hooks.call_torch_module(self, original, args, training, kwargs)

    wrapper.call = call

    # What a step keeps in attributes of layers and models is each replica's own.
    original_setattr = _Layer.__setattr__
    tracked = (Variable, torch.nn.Module, keras.metrics.Metric, keras.random.SeedGenerator)

    def setattr_(self: Any, name: str, value: Any) -> None:
        if _setters and not isinstance(value, tracked) and not _set_by_keras():
            for note in _setters:
                note(self, name)
        kept = hooks.layer_attributes()
        if kept is None or isinstance(value, tracked) or _set_by_keras():
            original_setattr(self, name, value)
            return
        found = inspect.getattr_static(type(self), name, _MISSING)
        if not isinstance(found, property):
            setattr(type(self), name, _replica_attribute(hooks, name, default=found))
        elif not getattr(found.fget, "_keras_distrib", False):
            original_setattr(self, name, value)  # the class' own property
            return
        hooks.keep_attribute(self, name)
        kept[(id(self), name)] = value

    _Layer.__setattr__ = setattr_

    # A stateful RNN expects its state's rows; a replica has a part of them.
    _RNN._expected_batch_size = _replica_attribute(hooks, "_expected_batch_size", absent=None)

    # Recurrent cells keep the masks of one call in attributes of the layer.
    for name in ("_dropout_mask", "_recurrent_dropout_mask"):
        setattr(_DropoutRNNCell, name, _replica_attribute(hooks, name))

    # Unseeded dropout draws from torch's one global generator, in whatever order the
    # threads come; the seeded way repeats.
    original_dropout = _random_module.dropout

    @functools.wraps(original_dropout)
    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        unseeded = seed is None or (isinstance(seed, _seed_module.SeedGenerator) and seed._initial_seed is None)
        if noise_shape is None and unseeded and 0.0 < rate < 1.0 and not is_symbolic():
            inputs = convert_to_tensor(inputs)
            generator = hooks.dropout_generator(inputs.device)
            if generator is not None:
                kept = torch.empty_like(inputs).bernoulli_(1.0 - rate, generator=generator)
                return inputs * kept.div_(1.0 - rate)
        return original_dropout(inputs, rate, noise_shape, seed)

    _random_module.dropout = dropout


def _install_state_dicts(hooks: Hooks) -> None:
    # torch sees the first replica's tensors alone.
    original_state_dict = _Layer.state_dict
    original_load_state_dict = _Layer.load_state_dict

    @functools.wraps(original_state_dict)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original_state_dict(self, *args, **kwargs)
        within = args or "destination" in kwargs  # of the layer that was asked
        return state if within or kwargs.get("keep_vars") else hooks.state_dict(self, state)

    @functools.wraps(original_load_state_dict)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with hooks.loading_state(self):
            return original_load_state_dict(self, *args, **kwargs)

    # Reading a variable may give the mean of its replicas' values, which is no parameter.
    def parameter(variable: Any) -> Any:
        stored = getattr(variable, "raw_value", None)
        return variable.value if stored is None else stored

    def track_variables(self: Any) -> None:
        self._torch_params = torch.nn.ParameterDict({v.path: parameter(v) for v in self.variables})

    def post_track_variable(self: Any, variable: Any) -> None:
        if hasattr(self, "_torch_params") and variable.path not in self.torch_params:
            self.torch_params[variable.path] = parameter(variable)

    _Layer._post_track_variable = post_track_variable
    _Layer._track_variables = track_variables
    _Layer.state_dict = state_dict
    _Layer.load_state_dict = load_state_dict


_MISSING = object()


def _set_by_keras() -> bool:
    """Whether the code that sets an attribute, two calls up, is Keras' own."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("keras.src")


def _replica_attribute(hooks: Hooks, name: str, absent: Any = _MISSING, default: Any = _MISSING) -> property:
    """An attribute that each replica has of its own; outside of replicas an ordinary one.

    `absent` is what a replica reads that has not set it; without it, what was set
    outside of replicas, or `default`, which the class had before.
    """

    def get(self: Any) -> Any:
        kept = hooks.layer_attributes()
        value = _MISSING if kept is None else kept.get((id(self), name), absent)
        if value is _MISSING:
            value = self.__dict__.get(name, default)
        if value is _MISSING:
            raise AttributeError(name)
        return value

    get._keras_distrib = True  # type: ignore[attr-defined]

    def set_(self: Any, value: Any) -> None:
        kept = hooks.layer_attributes()
        if kept is None:
            self.__dict__[name] = value
        else:
            kept[(id(self), name)] = value

    def delete(self: Any) -> None:
        kept = hooks.layer_attributes()
        if self.__dict__.pop(name, _MISSING) is _MISSING and (kept is None or (id(self), name) not in kept):
            raise AttributeError(name)
        if kept is not None:
            kept.pop((id(self), name), None)

    return property(get, set_, delete)


def _install_losses(hooks: Hooks) -> None:
    # A replica sees only its rows; the mean's denominator is the global batch's.
    original_call = _loss_module.Loss.__call__

    @functools.wraps(original_reduce_weighted_values)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        return hooks.reduce_loss(values, sample_weight, mask, reduction, dtype)

    @functools.wraps(original_call)
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return hooks.loss_call(self, functools.partial(original_call, self), y_true, y_pred, sample_weight)

    _loss_module.reduce_weighted_values = reduce_weighted_values
    _loss_module.Loss.__call__ = call


def _install_metrics(hooks: Hooks) -> None:
    # A scalar that a step gives to a metric, such as its loss, is one number of one
    # step on one device; each replica's counts by its share of the step.
    def wrap(cls: type) -> None:
        original = cls.update_state  # type: ignore[attr-defined]

        @functools.wraps(original)
        def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
            if sample_weight is None and len(getattr(values, "shape", ())) == 0:
                sample_weight = hooks.scalar_weight()
            return original(self, values, sample_weight)

        cls.update_state = update_state  # type: ignore[attr-defined]

    wrap(keras.metrics.Mean)
    wrap(keras.metrics.Sum)

    # A step that returns a metric's result, under whatever name, means the global one.
    def remembering(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def result(self: Any) -> Any:
            value = original(self)
            if isinstance(value, torch.Tensor) and hooks.in_replica():
                value = value.view_as(value)  # not the variable's own tensor
                value._keras_distrib_metric = self  # type: ignore[attr-defined]
            return value

        return result

    _wrap_everywhere(keras.metrics.Metric, "result", remembering)


def _install_seeds(hooks: Hooks) -> None:
    # Seed generators hold equal state on every replica; their draws must differ.
    original_next = _seed_module.SeedGenerator.next

    @functools.wraps(original_next)
    def next_seed(self: Any, ordered: bool = True) -> Any:
        return hooks.fold_seed(original_next(self, ordered))

    # The thread's own generator outlives every strategy: its state is a plain variable.
    original_global = _seed_module.global_seed_generator

    @functools.wraps(original_global)
    def global_seed_generator() -> Any:
        with hooks.outside_strategies():
            return original_global()

    # Random ops make a generator from a seed's value, which a traced step does not have.
    original_generator = _random_module.torch_seed_generator

    @functools.wraps(original_generator)
    def torch_seed_generator(seed: Any) -> Any:
        generator = hooks.captured_generator(seed)
        return original_generator(seed) if generator is None else generator

    original_cond = _torch_core.cond

    @functools.wraps(original_cond)
    def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        return hooks.captured_cond(original_cond, pred, true_fn, false_fn)

    _torch_core.cond = cond
    _random_module.torch_seed_generator = torch_seed_generator
    _seed_module.SeedGenerator.next = next_seed
    _seed_module.global_seed_generator = global_seed_generator


def is_builtin_loss(loss: Any) -> bool:
    """Whether a loss is Keras' own, whose values have one row per batch row."""
    if not type(loss).__module__.startswith("keras.src.losses"):
        return False
    return not isinstance(loss, _LossFunctionWrapper) or loss.fn.__module__.startswith("keras.src.losses")


def compares_rows(loss: Any) -> bool:
    """Whether a loss is one of Keras' own that is no mean of what each row gives alone."""
    return isinstance(loss, keras.losses.Dice | keras.losses.Tversky | keras.losses.Circle)


def has_mask(tensor: Any) -> bool:
    return getattr(tensor, "_keras_mask", None) is not None


def thread_state() -> dict[str, Any]:
    """A copy of the calling thread's Keras state, to be entered by another thread."""
    state = dict(_global_state.GLOBAL_STATE_TRACKER.__dict__)
    for name in _PER_REPLICA_ATTRIBUTES:
        state.pop(name, None)
    return state


@contextlib.contextmanager
def entered_thread_state(state: dict[str, Any], device_name: str | None = None, seeds: Any = None) -> Iterator[None]:
    """Makes `state` the calling thread's Keras state for a while.

    Args:
        state: what `thread_state` returned, in whichever thread.
        device_name: Keras device of the thread meanwhile; None keeps the state's.
        seeds: what stands in for the thread's global seed generator; None keeps
            the thread's own, and one that is made meanwhile stays.
    """
    own = _global_state.GLOBAL_STATE_TRACKER.__dict__
    saved = dict(own)
    own.clear()
    own.update({name: value.copy() if isinstance(value, list) else value for name, value in state.items()})
    if device_name is not None:
        own["torch_device"] = device_name
    own[_seed_module.GLOBAL_SEED_GENERATOR] = saved.get(_seed_module.GLOBAL_SEED_GENERATOR) if seeds is None else seeds
    try:
        yield
    finally:
        own = _global_state.GLOBAL_STATE_TRACKER.__dict__
        if seeds is None:
            saved[_seed_module.GLOBAL_SEED_GENERATOR] = own.get(_seed_module.GLOBAL_SEED_GENERATOR)
        own.clear()
        own.update(saved)


@contextlib.contextmanager
def without_stateless_scope() -> Iterator[None]:
    """Leaves the calling thread's stateless scope for a while."""
    scope = get_stateless_scope()
    _global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        _global_state.set_global_attribute("stateless_scope", scope)


@contextlib.contextmanager
def without_replica_scope() -> Iterator[None]:
    """Leaves a replica's state for a while, but no other stateless scope.

    Keras defers the creation of variables in a stateless scope to its end; a
    replica's state has no such end.
    """
    scope = get_stateless_scope()
    leave = scope is not None and getattr(scope, "is_replica_state", False)
    with without_stateless_scope() if leave else contextlib.nullcontext():
        yield


def is_symbolic() -> bool:
    """Whether the calling thread only infers shapes."""
    return get_device() == "meta"


def to_numpy(tensor: Any) -> Any:
    """A tensor as a NumPy array, from any device and dtype."""
    return _torch_core.convert_to_numpy(tensor)


def existing_seed_generator() -> Any | None:
    """The calling thread's generator for unseeded random ops, if it has one."""
    return _global_state.get_global_attribute(_seed_module.GLOBAL_SEED_GENERATOR)


def new_seed_generator() -> Any:
    """A generator for unseeded random ops."""
    return _seed_module.SeedGenerator()


def keep_seed_generator(generator: Any) -> None:
    """Makes it the calling thread's generator for unseeded random ops."""
    _global_state.set_global_attribute(_seed_module.GLOBAL_SEED_GENERATOR, generator)


@contextlib.contextmanager
def passing_message(message: str) -> Iterator[None]:
    """Shows a message at the end of a terminal's line while something lasts."""
    if not sys.stdout.isatty():
        yield
        return
    print_without_end(message)
    try:
        yield
    finally:
        back = "\b" * len(message)
        print_without_end(f"{back}{' ' * len(message)}{back}")


def print_without_end(message: str) -> None:
    """Shows a message as `print_message` does, without an end of line."""
    _io_utils.print_msg(message, line_break=False)


def print_message(message: str) -> None:
    """Prints as Keras' progress bar does (to stdout or to the log)."""
    _io_utils.print_msg(message)


class _Later:
    """Stands in Keras' list of variables whose creation a stateless scope puts off."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def _deferred_initialize(self) -> None:
        self._action()


def when_variables_exist(action: Callable[[], None]) -> None:
    """Calls `action` now, or after the variables whose creation is put off."""
    scope = get_stateless_scope()
    if scope is None or getattr(scope, "is_replica_state", False):
        action()
    else:
        _variables_module.register_uninitialized_variable(_Later(action))


def is_saveable(value: Any) -> bool:
    """Whether Keras saves the object's state: a layer, optimizer, metric or loss."""
    return isinstance(value, _KerasSaveable)


_setters: list[Callable[[Any, str], None]] = []
_readers: list[Callable[[Any, Any, str, Any], None]] = []
_readers_lock = threading.Lock()
_OBSERVED = (
    _KerasSaveable,
    torch.nn.Module,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
)


def is_observed(value: Any) -> bool:
    """Whether `reading_attributes` tells what is read of an object."""
    return isinstance(value, _OBSERVED)


@contextlib.contextmanager
def setting_attributes(note: Callable[[Any, str], None]) -> Iterator[None]:
    """Calls `note(layer, name)` when code that is not Keras' sets an attribute of a layer."""
    _setters.append(note)
    try:
        yield
    finally:
        _setters.remove(note)


@contextlib.contextmanager
def reading_attributes(note: Callable[[Any, Any, str, Any], None]) -> Iterator[None]:
    """Calls `note(owner, mapping, name, value)` when an attribute of a Keras object is read.

    `mapping` is where the object keeps it.
    """
    with _readers_lock:
        _readers.append(note)
        if len(_readers) == 1:
            for cls in _OBSERVED:
                cls.__getattribute__ = _noting_attribute
    try:
        yield
    finally:
        with _readers_lock:
            _readers.remove(note)
            if not _readers:
                for cls in _OBSERVED:
                    del cls.__getattribute__


def _noting_attribute(self: Any, name: str) -> Any:
    try:
        value = object.__getattribute__(self, name)
    except AttributeError:
        own = object.__getattribute__(self, "__dict__")
        for place in ("_modules", "_parameters", "_buffers"):  # where torch keeps some attributes
            mapping = own.get(place)
            if mapping is not None and name in mapping:
                _tell(self, mapping, name, mapping[name])
        raise
    if not name.startswith("__"):
        own = object.__getattribute__(self, "__dict__")
        if name in own:
            _tell(self, own, name, value)
    return value


def _tell(owner: Any, mapping: Any, name: str, value: Any) -> None:
    for note in list(_readers):
        note(owner, mapping, name, value)


def settings() -> tuple[Any, ...]:
    """Keras' settings that a captured step takes as constant."""
    config = keras.config
    policy = config.dtype_policy()
    return config.floatx(), config.epsilon(), config.image_data_format(), policy.compute_dtype, policy.variable_dtype


def is_plain_seed_generator(value: Any) -> bool:
    """Whether it is a `SeedGenerator` that draws in Keras' own way."""
    return type(value) is _seed_module.SeedGenerator


def drawn(seed: Any) -> int:
    """The 32 bits that Keras' next random op with this seed would seed its generator with."""
    pair: Any = _seed_module.draw_seed(seed)
    first, second = pair.tolist()
    return (first + second) & 0xFFFFFFFF


_LIBRARIES = {"keras_distrib", "keras", "optree", "tree", "numpy", "ml_dtypes", "torch", "sympy", "mpmath"}


def is_library(module: str) -> bool:
    """Whether a module is of this package, of Keras, of torch, or of what these call, by its name."""
    return module.split(".")[0] in _LIBRARIES


def is_seed_generator(value: Any) -> bool:
    return isinstance(value, _seed_module.SeedGenerator)


def saveable_children(saveable: Any) -> Iterator[tuple[str, Any]]:
    """The saveables in a saveable's attributes, with the names that Keras' files give them."""
    for name, child in _saving._walk_saveable(saveable):
        if isinstance(child, _KerasSaveable):
            yield name, child
        elif isinstance(child, list | dict | tuple):
            yield from _contained(child, name, set())


def _contained(container: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(container) in seen:
        return
    seen.add(id(container))
    used: dict[str, int] = {}
    for child in list(container.values()) if isinstance(container, dict) else container:
        if isinstance(child, _KerasSaveable):
            name = _saving._get_unique_name(_naming.to_snake_case(type(child).__name__), used)
            yield f"{path}/{name}", child
        elif isinstance(child, list | dict | tuple):
            yield from _contained(child, f"{path}/{_saving._get_unique_name('container', used)}", seen)


def tensor_of_array(array: Any) -> torch.Tensor:
    """A NumPy array as a tensor on the CPU, dtypes that NumPy does not know included."""
    with device("cpu"):
        return convert_to_tensor(array)

"""`python -m keras_distrib.migrate`: each kind of rule, the files it touches, and whole scripts that then run."""

import ast
import builtins
import importlib.util
import json
import os
import pathlib
import shutil
import stat

import pytest
from processes import output, python

from keras_distrib.migrate import migrate, rules, targets
from keras_distrib.migrate.__main__ import main, replace

SCRIPTS = sorted((pathlib.Path(__file__).parent / "migrate_scripts").glob("*.py"))
HEAD = "import tensorflow as tf\n"
BACKEND = 'import os\n\nos.environ["KERAS_BACKEND"] = "torch"\n'


def migrated(code, head=HEAD):
    """The new code without what is put before it, and the report's texts."""
    found = migrate(head + code)
    new = found.code.decode()
    kept = [line for line in new.splitlines() if not line.startswith(("import ", "os.environ["))]
    return "\n".join(kept).strip("\n"), found.report


def texts(lines):
    return [line.text for line in sorted(lines)]


# Each rule: a line before and after.
LINES = [
    # tf.distribute
    ("s = tf.distribute.MirroredStrategy()", "s = keras_distrib.MirroredStrategy()"),
    ("s = tf.distribute.get_strategy()", "s = keras_distrib.get_strategy()"),
    (
        "s = tf.distribute.experimental.CentralStorageStrategy()",
        "s = keras_distrib.experimental.CentralStorageStrategy()",
    ),
    (
        "r = s.reduce(tf.distribute.ReduceOp.SUM, v, axis=None)",
        "r = s.reduce(keras_distrib.ReduceOp.SUM, v, axis=None)",
    ),
    ("s.experimental_run_v2(f, args=(x,))", "s.run(f, args=(x,))"),
    ("metric.reset_states()", "metric.reset_state()"),
    # what has a counterpart of the same name
    ("a = tf.nn.compute_average_loss(x)", "a = keras_distrib.compute_average_loss(x)"),
    ("a = tf.nn.scale_regularization_loss(x)", "a = keras_distrib.scale_regularization_loss(x)"),
    ("with tf.GradientTape() as t: pass", "with keras_distrib.GradientTape() as t: pass"),
    ("try: f()\nexcept tf.errors.OutOfRangeError: pass", "try: f()\nexcept keras_distrib.errors.OutOfRangeError: pass"),
    # Keras
    ("m = tf.keras.Sequential()", "m = keras.Sequential()"),
    ("d = tf.keras.layers.Dense(1, input_shape=(1,))", "d = keras.layers.Dense(1, input_shape=(1,))"),
    (
        "r = tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.NONE)",
        'r = keras.losses.MeanSquaredError(reduction="none")',
    ),
    ("r = tf.keras.losses.Reduction.SUM", 'r = "sum"'),
    ("r = tf.losses.Reduction.AUTO", 'r = "sum_over_batch_size"'),
    ("o = tf.keras.optimizers.legacy.Adam(lr=0.1)", "o = keras.optimizers.Adam(learning_rate=0.1)"),
    ("o = tf.optimizers.SGD(0.1)", "o = keras.optimizers.SGD(0.1)"),
    ("m = tf.metrics.Mean()", "m = keras.metrics.Mean()"),
    ("l = tf.keras.losses.MSE(a, b)", "l = keras.losses.mean_squared_error(a, b)"),
    ("l = tf.keras.layers.experimental.preprocessing.Rescaling(2.0)", "l = keras.layers.Rescaling(2.0)"),
    (
        "l = tf.keras.layers.experimental.SyncBatchNormalization(axis=1)",
        "l = keras.layers.BatchNormalization(axis=1, synchronized=True)",
    ),
    ("tf.keras.backend.clear_session()", "keras.backend.clear_session()"),
    ("a = tf.keras.backend.mean(x, axis=1)", "a = keras.ops.mean(x, axis=1)"),
    ("print(model.optimizer.lr.numpy())", "print(model.optimizer.learning_rate.numpy())"),
    # functions of tensors
    ("a = tf.reduce_sum(x, 1, True)", "a = keras.ops.sum(x, 1, True)"),
    ("a = tf.math.reduce_mean(input_tensor=x, keepdims=True)", "a = keras.ops.mean(x=x, keepdims=True)"),
    ("a = tf.cast(x, tf.float32)", 'a = keras.ops.cast(x, "float32")'),
    ("a = tf.cast(x=x, dtype=tf.dtypes.int64)", 'a = keras.ops.cast(x=x, dtype="int64")'),
    ("a = tf.constant([1, 2], tf.int32)", 'a = keras.ops.convert_to_tensor([1, 2], "int32")'),
    ("a = tf.convert_to_tensor(x, dtype=y.dtype)", "a = keras.ops.convert_to_tensor(x, dtype=y.dtype)"),
    ("a = tf.shape(x)[0]", "a = keras.ops.shape(x)[0]"),
    ("a = tf.reshape(x, [-1, 2])", "a = keras.ops.reshape(x, [-1, 2])"),
    ("a = tf.reshape(tensor=x, shape=(2,))", "a = keras.ops.reshape(x=x, newshape=(2,))"),
    ("a = tf.concat([x, y], 0)", "a = keras.ops.concatenate([x, y], 0)"),
    ("a = tf.concat(axis=-1, values=[x, y])", "a = keras.ops.concatenate(axis=-1, xs=[x, y])"),
    ("a = tf.argmax(x)", "a = keras.ops.argmax(x, axis=0)"),
    ("a = tf.argmax(x, 1, output_type=tf.int32)", "a = keras.ops.argmax(x, 1)"),
    ("a = tf.gather(x, i)", "a = keras.ops.take(x, i, axis=0)"),
    ("a = tf.gather(x, i, axis=1)", "a = keras.ops.take(x, i, axis=1)"),
    ("a = tf.where(c, x, y)", "a = keras.ops.where(c, x, y)"),
    ("a = tf.clip_by_value(x, 0.0, clip_value_max=1.0)", "a = keras.ops.clip(x, 0.0, x_max=1.0)"),
    ("a = tf.one_hot(i, depth=3, axis=1)", "a = keras.ops.one_hot(i, num_classes=3, axis=1)"),
    ("a = tf.one_hot(i, 3, None, None, 1)", "a = keras.ops.one_hot(i, 3, axis=1)"),
    ("a = tf.nn.gelu(x)", "a = keras.ops.gelu(x, approximate=False)"),
    ("a = tf.math.top_k(x)", "a = keras.ops.top_k(x, k=1)"),
    ("f = tf.nn.relu", "f = keras.ops.relu"),
    (
        "a = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)",
        "a = keras.ops.sparse_categorical_crossentropy(target=y, output=x, from_logits=True)",
    ),
    (
        "a = tf.math.log(x) + tf.exp(x) + tf.math.sigmoid(x)",
        "a = keras.ops.log(x) + keras.ops.exp(x) + keras.ops.sigmoid(x)",
    ),
    ("a = tf.split(x, 2, axis=1)", "a = keras.ops.split(x, 2, axis=1)"),
    ("a = tf.einsum('ij,jk->ik', x, y)", "a = keras.ops.einsum('ij,jk->ik', x, y)"),
    ("a = tf.transpose(x, perm=[1, 0])", "a = keras.ops.transpose(x, axes=[1, 0])"),
    ("a = tf.add_n(xs)", "a = sum(xs)"),
    ("for i in tf.range(n): pass", "for i in range(n): pass"),
    ("a = [i for i in tf.range(0, n, 2)]", "a = [i for i in range(0, n, 2)]"),
    ("a = tf.range(n)", "a = keras.ops.arange(n)"),
    ("a = tf.range(0, limit=n, dtype=tf.float32)", 'a = keras.ops.arange(0, stop=n, dtype="float32")'),
    ("tf.print('x', x, sep=', ')", "print('x', x, sep=', ')"),
    ("tf.random.set_seed(1)", "keras.utils.set_random_seed(1)"),
    ("a = tf.random.normal((2,), stddev=2.0)", "a = keras.random.normal((2,), stddev=2.0)"),
    ("a = tf.random.uniform((2,), 0, 5, tf.int32)", 'a = keras.random.randint((2,), 0, 5, "int32")'),
    (
        "a = tf.random.uniform((2,), maxval=5, dtype=tf.int32)",
        'a = keras.random.randint((2,), maxval=5, dtype="int32", minval=0)',
    ),
    # variables
    ("v = tf.Variable(1.0, False)", "v = keras.Variable(1.0, trainable=False)"),
    ("v = tf.Variable(initial_value=x, name='v')", "v = keras.Variable(initializer=x, name='v')"),
    ("v = tf.Variable(0)", "v = keras.Variable(0, trainable=False)"),
    ("v = tf.Variable(0, dtype=tf.float32)", 'v = keras.Variable(0, dtype="float32")'),
    # devices
    ("d = tf.config.list_physical_devices('CPU')", "d = keras_distrib.config.list_physical_devices('CPU')"),
    (
        "d = tf.config.experimental.list_logical_devices(device_type='CPU')",
        "d = keras_distrib.config.list_logical_devices(kind='CPU')",
    ),
    (
        "tf.config.experimental.set_virtual_device_configuration(d, [])",
        "keras_distrib.config.set_logical_device_configuration(d, [])",
    ),
    ("c = tf.config.LogicalDeviceConfiguration()", "c = keras_distrib.config.LogicalDeviceConfiguration()"),
    (
        "c = tf.config.experimental.VirtualDeviceConfiguration()",
        "c = keras_distrib.config.LogicalDeviceConfiguration()",
    ),
    # annotations
    ("def f(x: tf.Tensor) -> tf.Tensor: return x", "def f(x: torch.Tensor) -> torch.Tensor: return x"),
    # the text around stays
    ("a = (tf.square)(x)  # tf.square", "a = (keras.ops.square)(x)  # tf.square"),
    ('a = f"{tf.cast(x, tf.float32)} tf.cast"', "a = f\"{keras.ops.cast(x, 'float32')} tf.cast\""),
    ("a = tf.reduce_sum(\n    x,\n    axis=0,\n)", "a = keras.ops.sum(\n    x,\n    axis=0,\n)"),
]


@pytest.mark.parametrize(("before", "after"), LINES)
def test_a_line(before, after):
    new, report = migrated(before)
    assert new == after
    assert not report.missing
    assert not report.kept


# Lines that are left, what is reported, and a part of the reason.
LEFT = [
    ("tf.summary.scalar('x', 1)", "tf.summary.scalar", "TensorBoard"),
    ("print(tf.__version__)", "tf.__version__", "keras.__version__"),
    ("tf.compat.v1.disable_eager_execution()", "tf.compat.v1.disable_eager_execution", "TensorFlow 1"),
    ("from tensorflow.python.ops import x\ny = x.f", "x.f", "private"),
    ("e = tf.estimator.Estimator(f)", "tf.estimator.Estimator", "Keras model"),
    ("s = tf.distribute.TPUStrategy(r)", "tf.distribute.TPUStrategy", ""),
    ("tf.config.run_functions_eagerly(True)", "tf.config.run_functions_eagerly", "eagerly"),
    ("m = tf.keras.experimental.LinearModel()", "tf.keras.experimental.LinearModel", "no counterpart"),
    ("x = tf.keras.backend.ctc_batch_cost(a, b)", "tf.keras.backend.ctc_batch_cost", "no counterpart"),
    ("a = tf.unique(x)", "tf.unique", "no counterpart"),
    ("a = tf.constant('text')", "tf.constant", "strings"),
    ("a = tf.constant(0, shape=(2,))", "tf.constant", "`shape`"),
    ("a = tf.matmul(x, y, transpose_b=True)", "tf.matmul", "`transpose_b`"),
    ("a = tf.where(c)", "tf.where", "without `x`"),
    ("a = tf.split(x, [1, 2])", "tf.split", "sizes"),
    ("a = tf.shape(x) * 2", "tf.shape", "tuple"),
    ("a = tf.random.normal((2,), seed=1)", "tf.random.normal", "`seed`"),
    ("a = tf.reduce_sum(*args)", "tf.reduce_sum", "write them out"),
    ("a = tf.reduce_sum(x, reduction_indices=1)", "tf.reduce_sum", "`reduction_indices`"),
    ("v = tf.Variable(1.0, validate_shape=False)", "tf.Variable", "`validate_shape`"),
    ("f = tf.argmax", "tf.argmax", "lambda"),
    ("a = x.dtype == tf.float32", "tf.float32", "standardize_dtype"),
    ("g = tf.config.experimental.set_memory_growth(d, True)", "tf.config.experimental.set_memory_growth", "not needed"),
]


@pytest.mark.parametrize(("line", "name", "reason"), LEFT)
def test_what_has_no_counterpart_is_left_and_reported(line, name, reason):
    new, report = migrated(line)
    assert new == line
    [missing] = texts(report.missing)
    assert missing.startswith(f"{name}: ")
    assert reason in missing
    assert "tensorflow" in migrate(HEAD + line).code.decode()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("optimizer.minimize(loss, variables)", ".minimize: compute gradients"),
        (
            "o.apply_gradients(g, experimental_aggregate_gradients=False)",
            ".apply_gradients(experimental_aggregate_gradients=)",
        ),
        ("v.read_value()", ".read_value: write"),
        (
            "c = tf.config.LogicalDeviceConfiguration(memory_limit=8)",
            "tf.config.LogicalDeviceConfiguration(memory_limit=)",
        ),
        ("model.fit(x, workers=4)", ".fit(workers=)"),
        ("o = tf.keras.optimizers.SGD(0.1, decay=0.1)", "tf.keras.optimizers.SGD(decay=): pass a schedule"),
        (
            "c = tf.keras.callbacks.ModelCheckpoint('x', period=2)",
            "tf.keras.callbacks.ModelCheckpoint(period=): keras.",
        ),
        ("l = tf.keras.layers.LSTM(2, time_major=True)", "tf.keras.layers.LSTM(time_major=): keras.layers.LSTM has no"),
    ],
)
def test_arguments_and_methods_without_counterpart_are_reported(line, said):
    assert [text for text in texts(migrated(line)[1].missing) if text.startswith(said)]


def test_names_left_out_are_said():
    new, report = migrated("a = tf.square(x, name='y')")
    assert new == "a = keras.ops.square(x)"
    assert "tf.square -> keras.ops.square (`name=` left out)" in texts(report.changes)


def test_the_reasons_that_the_package_gives_are_used(monkeypatch):
    monkeypatch.setattr(
        targets, "_not_offered", lambda: {"tf.distribute.Server": "a reason", "Strategy.unwrap": "another"}
    )
    assert texts(migrated("s = tf.distribute.Server(c)")[1].missing) == ["tf.distribute.Server: a reason"]
    assert texts(migrated("mirrored_strategy.unwrap(x)")[1].missing) == ["Strategy.unwrap: another"]


IMPORTS = [
    ("import tensorflow as tf\na = tf.zeros(3)\n", "import keras\na = keras.ops.zeros(3)\n"),
    ("import tensorflow\na = tensorflow.zeros(3)\n", "import keras\na = keras.ops.zeros(3)\n"),
    (
        "import tensorflow as t, numpy as np\na = t.zeros(3)\n",
        "import keras\nimport numpy as np\na = keras.ops.zeros(3)\n",
    ),
    ("from tensorflow import keras\nm = keras.Model\n", "import keras\nm = keras.Model\n"),
    ("from tensorflow import keras as k\nm = k.Model\n", "import keras as k\nm = k.Model\n"),
    ("import tensorflow.keras as keras\nm = keras.Model\n", "import keras\nm = keras.Model\n"),
    ("import tensorflow.keras\nm = tensorflow.keras.Model\n", "import keras\nm = keras.Model\n"),
    ("import tensorflow.keras.layers as L\nm = L.Dense\n", "from keras import layers as L\nm = L.Dense\n"),
    (
        "from tensorflow.keras import layers, models\nm = layers.Dense, models.Model\n",
        "from keras import layers, models\nm = layers.Dense, models.Model\n",
    ),
    ("from tensorflow.keras.layers import Dense as D\nm = D(1)\n", "from keras.layers import Dense as D\nm = D(1)\n"),
    ("from tensorflow.keras.layers import *\nm = Dense(1)\n", "from keras.layers import *\nm = Dense(1)\n"),
    ("from tensorflow.keras.layers import Dense\n", "from keras.layers import Dense\n"),
    (
        "from tensorflow import distribute\ns = distribute.get_strategy()\n",
        "import keras_distrib as distribute\ns = distribute.get_strategy()\n",
    ),
    (
        "from tensorflow.distribute import MirroredStrategy\ns = MirroredStrategy()\n",
        "from keras_distrib import MirroredStrategy\ns = MirroredStrategy()\n",
    ),
    (
        "from tensorflow import float32, reduce_sum\na = reduce_sum(x), float32\n",
        'from keras.ops import sum as reduce_sum\na = reduce_sum(x), "float32"\n',
    ),
    (
        "import tensorflow as tf\nkeras = tf.keras\nlayers = keras.layers\nm = layers.Dense(1)\n",
        "import keras\nlayers = keras.layers\nm = layers.Dense(1)\n",
    ),
    ("import tensorflow as tf\nnn = tf.nn\na = nn.relu(x)\n", "import keras\na = keras.ops.relu(x)\n"),
    ("import tensorflow as tf\nimport tensorflow as tf\na = tf.zeros(3)\n", "import keras\na = keras.ops.zeros(3)\n"),
    (
        "try:\n    import tensorflow as tf\nexcept ImportError:\n    tf = None\na = tf.zeros(3)\n",
        "import keras\ntry:\n    pass\nexcept ImportError:\n    tf = None\na = keras.ops.zeros(3)\n",
    ),
    (
        "def f():\n    import tensorflow as tf\n    return tf.zeros(3)\n",
        "import keras\ndef f():\n    return keras.ops.zeros(3)\n",
    ),
    (
        "from tensorflow.keras import backend as K\na = K.mean(x), K.epsilon()\n",
        "from keras import backend as K\nimport keras\na = keras.ops.mean(x), K.epsilon()\n",
    ),
]


@pytest.mark.parametrize(("before", "after"), IMPORTS)
def test_imports(before, after):
    found = migrate(before)
    new = found.code.decode().replace(BACKEND, "")
    assert sorted(new.splitlines()) == sorted(after.splitlines())
    assert not found.report.missing
    ast.parse(new)


def test_the_backend_is_chosen_before_keras_is_imported():
    code = (
        '"""Doc."""\n\nfrom __future__ import annotations\n\n'
        "import numpy as np\nimport keras\nimport tensorflow as tf\n\na = tf.zeros(3)\n"
    )
    expected = (
        '"""Doc."""\n\nfrom __future__ import annotations\n\nimport numpy as np\n'
        'import os\n\nos.environ["KERAS_BACKEND"] = "torch"\nimport keras\n\na = keras.ops.zeros(3)\n'
    )
    assert migrate(code).code.decode() == expected


def test_a_backend_that_is_set_is_made_torch():
    code = 'import os\nos.environ["KERAS_BACKEND"] = "tensorflow"\nimport tensorflow as tf\na = tf.zeros(3)\n'
    new = migrate(code).code.decode()
    assert new.count("KERAS_BACKEND") == 1
    assert 'os.environ["KERAS_BACKEND"] = "torch"\nimport keras\n' in new


def test_the_import_stays_for_what_is_left():
    new = migrate(HEAD + "a = tf.zeros(3), tf.unique(x)\n").code.decode()
    assert new == BACKEND + "import keras\n" + HEAD + "a = keras.ops.zeros(3), tf.unique(x)\n"


def test_scopes_decide():
    code = (
        "tf = None\ndef f(tf):\n    return tf.zeros(3)\n"
        "def g():\n    tf = x\n    return tf.zeros(3)\n"
        "class A:\n    tf = 3\n"
        "s = 'tf.zeros'  # tf.zeros\n"
        "a.tf.zeros(3)\n"
        "f(tf=3)\n"
    )
    assert migrated(code)[0] == code.strip()


def test_a_name_with_two_meanings_is_reported():
    code = "if x:\n    tf = other\na = tf.zeros(3)"
    new, report = migrated(code)
    assert new == code
    assert texts(report.missing) == ["tf.zeros: `tf` is another thing as well here: rename one"]


def test_a_variable_with_several_values_is_none_of_tensorflow():
    new, report = migrated("if x:\n    f = tf.nn.relu\nelse:\n    f = other\ny = f(x)")
    assert new == "if x:\n    f = keras.ops.relu\nelse:\n    f = other\ny = f(x)"
    assert not report.missing


def test_a_new_name_that_is_taken_is_reported():
    code = "def f(keras):\n    return tf.zeros(3)"
    new, report = migrated(code)
    assert new == code
    assert texts(report.missing) == ["tf.zeros: `keras` is another thing here: rename it"]


def test_memory_growth_is_taken_out():
    new, report = migrated("for gpu in gpus:\n    tf.config.experimental.set_memory_growth(gpu, True)")
    assert new == "for gpu in gpus:\n    pass"
    assert not report.missing


PIPELINE = """
def helper(x):
    return tf.cast(x, tf.float32)


def scale(x, y):
    return helper(x) / tf.constant(2.0), y


class Loader:
    def parse(self, x):
        return tf.io.decode_raw(x, tf.uint8)

    def load(self, ds):
        return ds.map(self.parse)


ds = tf.data.Dataset.from_tensor_slices((x, tf.zeros(3))).map(scale, num_parallel_calls=tf.data.AUTOTUNE)
ds = ds.filter(lambda x, y: tf.reduce_all(x > 0)).batch(2)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
"""


def test_pipelines_stay():
    new, report = migrated(PIPELINE + "a = tf.zeros(3)")
    assert new == (PIPELINE + "a = keras.ops.zeros(3)").strip()
    assert not report.missing
    assert {"tf.cast", "tf.zeros", "tf.io.decode_raw", "tf.data.AUTOTUNE", "tf.reduce_all"} <= set(texts(report.kept))


def test_a_function_of_a_pipeline_that_is_used_elsewhere_is_reported():
    _, report = migrated(PIPELINE + "a = helper(x)")
    assert [text for text in texts(report.missing) if text.startswith("helper: it is used in a tf.data pipeline")]


def test_other_maps_are_no_pipelines():
    assert migrated("pool.map(lambda x: tf.square(x), xs)")[0] == "pool.map(lambda x: keras.ops.square(x), xs)"


def test_without_tensorflow_nothing_changes():
    code = "import numpy as np\noptimizer.minimize(x)\nprint(tf.zeros)\n"
    found = migrate(code)
    assert found.code == code.encode()
    assert found.report.lines("x.py") == ["x.py: does not use tensorflow, unchanged"]


# The tables agree with the libraries.


def test_each_target_exists_and_takes_the_arguments():
    for name, op in rules.OPS.items():
        taken = {parameter.name for parameter in targets.parameters(op.target)}
        given = {parameter.new for parameter in op.parameters if parameter.new} | {added for added, _ in op.adds}
        assert given <= taken, name
    for new in [*rules.BACKEND.values(), *rules.PREFIXES.values()]:
        assert new.startswith("keras_distrib") or targets.exists(new), new


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_each_rule_has_the_parameters_of_tensorflow():
    code = f"""
import inspect, json
import tensorflow as tf
found = {{}}
for name in {sorted(rules.OPS)!r}:
    function = tf
    for part in name.split("."):
        function = getattr(function, part, None)
    if function is not None and not name.startswith("keras."):
        try:
            found[name] = list(inspect.signature(function).parameters)
        except ValueError:
            pass
print(json.dumps(found))
"""
    found = json.loads(output("-c", code, TF_CPP_MIN_LOG_LEVEL="3").splitlines()[-1])
    assert len(found) > 150
    for name, parameters in found.items():
        ours = [parameter.name for parameter in rules.OPS[name].parameters]
        if "args" not in parameters and "kwargs" not in parameters and rules.OPS[name].rest is None:
            assert parameters == ours, name


# Files and exit codes.


def test_without_write_nothing_changes(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(HEAD + "s = tf.distribute.get_strategy()\n")
    assert main([str(script)]) == 0
    assert script.read_text() == HEAD + "s = tf.distribute.get_strategy()\n"
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == str(script)
    assert "  line 2: tf.distribute.get_strategy -> keras_distrib.get_strategy" in printed


def test_write_keeps_mode_encoding_newlines_and_links(tmp_path, capsys):
    script = tmp_path / "script.py"
    before = "# -*- coding: latin-1 -*-\r\nimport tensorflow as tf\r\nname = 'é'\r\na = tf.zeros(3)\r\n"
    script.write_bytes(before.encode("latin-1"))
    script.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(script)
    assert main(["--write", str(link)]) == 0
    assert link.is_symlink()
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    after = script.read_bytes()
    assert b"name = '\xe9'\r\na = keras.ops.zeros(3)\r\n" in after
    assert b"\n" not in after.replace(b"\r\n", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "script.py"]


def test_a_byte_order_mark_stays():
    code = b"\xef\xbb\xbf" + HEAD.encode() + b"a = tf.zeros(3)\n"
    assert migrate(code).code.startswith(b"\xef\xbb\xbf")


def test_a_failed_write_leaves_the_file(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("before")

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        replace(script, b"after")
    assert script.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_exit_codes(tmp_path, capsys):
    good, some, bad = tmp_path / "good.py", tmp_path / "some.py", tmp_path / "bad.py"
    good.write_text(HEAD + "a = tf.zeros(3)\n")
    some.write_text(HEAD + "a = tf.zeros(3), tf.unique(x)\n")
    bad.write_text("import tensorflow as tf\ndef (:\n")
    assert main(["--write", str(good)]) == 0
    assert main(["--write", str(some)]) == 1
    assert "keras.ops.zeros(3), tf.unique(x)" in some.read_text()
    assert main([str(good), str(some)]) == 1
    capsys.readouterr()
    assert main(["--write", str(bad), str(tmp_path / "none.py"), str(tmp_path / "a.ipynb")]) == 2
    errors = capsys.readouterr().err
    assert f"{bad}: line 2" in errors
    assert "No such file" in errors
    assert "nbconvert" in errors
    assert bad.read_text() == "import tensorflow as tf\ndef (:\n"
    with pytest.raises(SystemExit) as usage:
        main([])
    assert usage.value.code == 2


def test_without_libcst_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "libcst":
            raise ImportError("no libcst")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install "keras-distrib\[migrate\]"'):
        migrate(HEAD)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_second_run_changes_nothing(path):
    first = migrate(path.read_bytes())
    assert first.code != path.read_bytes()
    second = migrate(first.code)
    assert second.code == first.code
    assert not second.report.changes


def test_the_command_migrates_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HEAD + "a = tf.zeros(3), tf.unique(x)\n")
    done = python("-m", "keras_distrib.migrate", script, "--write")
    assert done.returncode == 1, done.stderr
    assert "  line 2: tf.unique: " in done.stdout
    assert "keras.ops.zeros(3), tf.unique(x)" in script.read_text()


# Whole scripts. What they print is what TensorFlow 2.21 prints for the script as written.
PRINTED = {
    "callbacks": "fell True restored True files 4 loss 0.4138",
    "checkpoints": "fell True same True step 15 kept 2 loss 0.6519",
    "custom_loop": "fell True train 0.4404 test 0.4944",
    "fit_arrays": "fell True loss 0.5533 mae 0.5889 predicted 120",
    "input_function": "steps 4 sum 496 rows 32",
    "logical_devices": "devices 2 total 24 steps 3 doubled 6 ids 1",
    "replica_values": "checks 6 of 6",
    "steps_per_loop": "half 78 whole 300 steps 3 ended True",
    "strategy_switch": "alike True loaded True has False loss 0.0017",
    "train_step": "fell True agree True fit 1.1431 loop 1.4679",
}
RUN_ALL = """
import contextlib, io, json, pathlib, runpy, sys, traceback
printed = {}
for path in sys.argv[1:]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
        printed[pathlib.Path(path).stem] = out.getvalue().splitlines()[-1]
    except Exception:
        printed[pathlib.Path(path).stem] = traceback.format_exc()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The last line of each migrated script; the one that sets up devices runs in a process of its own."""
    folder = tmp_path_factory.mktemp("scripts")
    codes = {path.stem: main(["--write", str(shutil.copy(path, folder))]) for path in SCRIPTS}
    own = folder / "logical_devices.py"
    others = sorted(set(folder.glob("*.py")) - {own})
    found = {}
    for devices, scripts in (("cpu=2", others), (None, [own])):
        environment = {"KERAS_DISTRIB_LOGICAL_DEVICES": devices, "KERAS_BACKEND": None, "TF_CPP_MIN_LOG_LEVEL": "3"}
        out = output("-c", RUN_ALL, *scripts, cwd=folder, **environment)
        found.update(json.loads(out.splitlines()[-1]))
    return {name: (codes[name], line) for name, line in found.items()}


def test_there_is_a_line_for_each_script():
    assert sorted(PRINTED) == [path.stem for path in SCRIPTS]


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow, for tf.data, is not installed")
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_a_migrated_script_prints_what_the_original_does(name, printed):
    assert printed[name] == (0, PRINTED[name])

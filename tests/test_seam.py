"""Importing the package changes nothing for models of no strategy; other backends are refused."""

import json
import textwrap

import pytest
from processes import output, python

TEN_MODELS = textwrap.dedent(
    """
    import hashlib, json, sys
    import keras, numpy as np, torch
    if sys.argv[1] == "with":
        import keras_distrib
    from keras import layers

    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(20, 6)).astype("float32"), rng.integers(0, 3, size=(20,))
    S, T = rng.integers(0, 9, size=(20, 5)), rng.normal(size=(20, 5, 3)).astype("float32")
    CE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    class Noisy(keras.layers.Layer):
        def call(self, x, training=False):
            self.add_loss(keras.ops.mean(x) * 0.1)
            return x + keras.random.normal(x.shape, stddev=0.1) if training else x

    class Custom(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            self.zero_grad()
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
            return {"loss": loss}

    def functional():
        i = keras.Input((6,))
        return keras.Model(i, [layers.Dense(3, name="a")(i), layers.Dense(1, name="b")(i)])

    Seq = keras.Sequential
    cases = {
        "dense": (lambda: Seq([layers.Dense(8, "relu", kernel_regularizer="l2"), layers.Dense(3)]), X, Y, CE, "adam"),
        "norms": (lambda: Seq([layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)]), X, Y, CE, "sgd"),
        "noise": (lambda: Seq([Noisy(), layers.Dense(3)]), X, Y, CE, "rmsprop"),
        "lstm": (lambda: Seq([layers.LSTM(4, dropout=0.2), layers.Dense(3)]), T, Y, CE, "nadam"),
        "mask": (lambda: Seq([layers.Embedding(9, 4, mask_zero=True), layers.GRU(3)]), S, Y, CE, "adamax"),
        "outputs": (functional, X, [Y, X[:, :1]], [CE, "mse"], "lion"),
        "custom": (Custom, X, Y, CE, "adagrad"),
        "accumulate": (lambda: Seq([layers.Dense(3)]), X, Y, CE,
                       keras.optimizers.Adam(gradient_accumulation_steps=2, global_clipnorm=1.0)),
        "scaled": (lambda: Seq([layers.Dense(3, dtype="mixed_bfloat16")]), X, Y, CE,
                   keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
        "frozen": (lambda: Seq([layers.Dense(4, trainable=False), layers.Dense(3)]), X, Y, CE,
                   keras.optimizers.Adafactor(0.01, use_ema=True, ema_overwrite_frequency=2)),
    }
    result = {}
    for name, (build, x, y, loss, optimizer) in cases.items():
        keras.utils.set_random_seed(5)
        model = build()
        model.compile(optimizer, loss)
        history = model.fit(x, y, batch_size=6, epochs=2, verbose=0, validation_data=(x, y)).history
        digest = hashlib.sha256()
        for array in [*model.get_weights(), *keras.tree.flatten(model.predict(x, verbose=0))]:
            digest.update(np.ascontiguousarray(array).tobytes())
        result[name] = [history, digest.hexdigest()]
    print(json.dumps(result))
    """
)


def test_ten_models_train_the_same_with_and_without_the_import(tmp_path):
    script = tmp_path / "ten.py"
    script.write_text(TEN_MODELS)
    results = []
    for argument in ("with", "without"):
        results.append(json.loads(output(script, argument).splitlines()[-1]))
    assert len(results[0]) == 10
    assert results[0] == results[1]


@pytest.mark.parametrize("backend", ["numpy", "tensorflow"])
def test_another_backend_is_refused(backend):
    done = python("-c", "import keras_distrib", KERAS_BACKEND=backend)
    assert done.returncode != 0
    assert "ImportError: keras_distrib needs" in done.stderr
    assert "Set the environment variable KERAS_BACKEND=torch" in done.stderr


def test_a_second_install_changes_nothing():
    import keras

    from keras_distrib import hooks

    before = (keras.Model.__bases__, keras.Variable.__new__, keras.layers.Layer._maybe_build)
    hooks.install()
    assert (keras.Model.__bases__, keras.Variable.__new__, keras.layers.Layer._maybe_build) == before


def test_only_the_seam_touches_keras_internals():
    import pathlib

    import keras_distrib

    folder = pathlib.Path(keras_distrib.__file__).parent
    users = [p.name for p in folder.rglob("*.py") if "keras.src" in p.read_text() and p.name != "keras_seam.py"]
    assert users == []


def test_torch_is_the_default_where_keras_is_not_imported_yet():
    out = output("-c", "import keras_distrib, keras; print(keras.backend.backend())", KERAS_BACKEND=None)
    assert out.strip() == "torch"

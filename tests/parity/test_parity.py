"""N replicas against one device, by the measure of `keras_distrib.testing`.

One row of the table is one kind of model, loss or batch. `pytest tests/parity`
prints each row's worst figure: the difference as a part of what is allowed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest

import keras_distrib as kd
from keras_distrib.testing import assert_replicas_agree

RNG = np.random.default_rng(7)


@dataclass(frozen=True)
class Row:
    """A model, its data, and how they are trained."""

    name: str
    model: Callable[[], Any]
    data: Any
    batch_size: int = 8
    options: dict[str, Any] = field(default_factory=dict)


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def classes(rows, count=4):
    return RNG.integers(0, count, size=(rows,))


def mlp(optimizer="adam", **options):
    def build():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made = keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer()
        model.compile(made, options.get("loss", loss), metrics=options.get("metrics", ["accuracy"]))
        return model

    return build


def convnet():
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def regularized():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "relu", kernel_regularizer="l2", activity_regularizer="l1")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, bias_regularizer="l1")(hidden))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def two_outputs():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(4, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)])
    loss = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]
    model.compile(keras.optimizers.RMSprop(0.01), loss, loss_weights=[1.0, 0.3], metrics=[["accuracy"], ["mae"]])
    return model


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Embedding(20, 6)
        self.attend = keras.layers.MultiHeadAttention(2, 3)
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(4)

    def call(self, x):
        x = self.embed(x)
        return self.head(keras.ops.mean(self.norm(x + self.attend(x, x)), axis=1))


def subclassed():
    model = Subclassed()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def recurrent():
    model = keras.Sequential([keras.layers.Input((5, 3)), keras.layers.GRU(6), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def optimizer(name, **options):
    return lambda: getattr(keras.optimizers, name)(0.01, **options)


X, Y = normal(30, 6), classes(30)
ROWS = [
    Row("mlp, batches that divide", mlp(), (X, Y), batch_size=10),
    Row("mlp, ragged last batch", mlp(), (X, Y), batch_size=8),
    Row("mlp, last batch of one row", mlp(), (X[:25], Y[:25]), batch_size=8),
    Row("mlp, fewer rows than replicas", mlp(), (X[:9], Y[:9]), batch_size=2),
    Row("mlp, batches of one row", mlp(), (X[:5], Y[:5]), batch_size=1),
    Row("sum loss", mlp("sgd", loss=keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")), (X, Y)),
    Row("convnet", convnet, (normal(22, 8, 8, 1), classes(22))),
    Row("regularizers", regularized, (X, normal(30, 1))),
    Row("two outputs, loss weights", two_outputs, (X, [Y, normal(30, 1)])),
    Row("subclassed, attention", subclassed, (RNG.integers(0, 20, size=(21, 7)), classes(21))),
    Row("recurrent", recurrent, (normal(19, 5, 3), normal(19, 1))),
    Row("SGD with momentum", mlp(optimizer("SGD", momentum=0.9, nesterov=True)), (X, Y)),
    Row("global_clipnorm", mlp(optimizer("Adam", global_clipnorm=0.1)), (X, Y)),
    Row("clipnorm and decay", mlp(optimizer("AdamW", clipnorm=0.1)), (X, Y)),
    Row("clipvalue", mlp(optimizer("SGD", clipvalue=0.01)), (X, Y)),
    Row("Adafactor", mlp(optimizer("Adafactor")), (X, Y)),
    Row("validation split", mlp(), (X, Y), options={"validation_split": 0.3}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_parity(row, record_parity):
    options = {"batch_size": row.batch_size, **row.options}
    for report in assert_replicas_agree(row.model, row.data, [1, 2, 3, 4, 5], **options):
        record_parity(row.name, report)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_parity_with_central_storage(row, record_parity):
    options = {"batch_size": row.batch_size, "strategy_fn": kd.experimental.CentralStorageStrategy, **row.options}
    for report in assert_replicas_agree(row.model, row.data, [3], **options):
        record_parity(f"{row.name} (central)", report)


def test_sgd_without_randomness_is_close_in_every_element(replicas):
    """Final weights within 1e-5, element by element."""
    strategy = kd.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])
    weights = []
    for scope in (None, strategy):
        keras.utils.set_random_seed(0)
        if scope is None:
            model = mlp("sgd")()
        else:
            with scope.scope():
                model = mlp("sgd")()
        model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for own, other in zip(*weights, strict=True):
        np.testing.assert_allclose(other, own, atol=1e-5)


def test_the_check_finds_a_difference(monkeypatch):
    """The mean of the replicas' means, where they have 2, 2 and 1 rows, is reported by layer."""
    from keras_distrib.replicas.state import ReplicaState

    original = ReplicaState.__init__

    def wrong(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.share = 1.0 / self.num_active

    monkeypatch.setattr(ReplicaState, "__init__", wrong)
    with pytest.raises(AssertionError, match=r"gradients: .* of what is allowed\) in .*dense"):
        assert_replicas_agree(mlp("sgd"), (X[:10], Y[:10]), [3], batch_size=5)


GOLDEN = [
    # rows, batch size, loss of the epoch, w and b after it: one device of the original, any replicas here
    (6, 6, 23.1667, 1.37333, 0.09),
    (6, 4, 18.522966, 1.7903, 0.1766),
    (5, 4, 15.66098, 1.693, 0.1686),
    (5, 2, 12.81481, 1.77491, 0.213082),
    (6, 3, 18.987726, 1.672222, 0.165467),
]


@pytest.mark.parametrize(("rows", "batch_size", "loss", "w", "b"), GOLDEN)
def test_golden_fit_of_the_original(replicas, rows, batch_size, loss, w, b):
    x = np.arange(1, rows + 1, dtype="float32")[:, None]
    strategy = kd.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    history = model.fit(x, 2 * x + 1, batch_size=batch_size, shuffle=False, verbose=0)
    np.testing.assert_allclose(history.history["loss"], [loss], rtol=1e-5)
    np.testing.assert_allclose([v.item() for v in model.get_weights()], [w, b], rtol=1e-5)

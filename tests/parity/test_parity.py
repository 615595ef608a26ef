"""N replicas against one device, by the measure of `keras_distrib.testing`.

One row of the table is one kind of model, loss or batch. `pytest tests/parity`
prints each row's worst figure: the difference as a part of what is allowed.
PARITY_REPLICAS=3,5 in the environment compares those numbers of replicas alone.
"""

import os

import keras
import numpy as np
import pytest
from parity.rows import BATCHES, LAYERS, LOSSES, ROWS, X, Y, mlp

import keras_distrib as kd
from keras_distrib.testing import assert_replicas_agree

REPLICAS = [int(count) for count in os.environ.get("PARITY_REPLICAS", "1,2,3,4,5").split(",")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_parity(row, record_parity):
    options = {"batch_size": row.batch_size, **row.options}
    for report in assert_replicas_agree(row.model, row.data, REPLICAS, **options):
        record_parity(row.name, report)


@pytest.mark.parametrize("row", BATCHES + LOSSES[::3] + LAYERS[::3], ids=lambda row: row.name)
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

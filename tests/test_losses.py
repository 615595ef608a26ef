"""Loss scaling, in and outside of replicas. Golden values: tf.distribute 2.21."""

import keras
import numpy as np
import pytest
import torch

import keras_distrib as kd
from keras_distrib.values import PerReplica


@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        ([1.0, 2.0, 3.0], {}, 2),
        ([1.0, 2.0, 3.0], {"global_batch_size": 10}, 0.6),
        ([1.0, 2.0, 3.0, 4.0, 5.0], {"global_batch_size": 10}, 1.5),
        ([1.0, 2.0, 3.0], {"global_batch_size": 0}, 0),
        ([1.0, 2.0, 3.0], {"sample_weight": [0.0, 1.0, 2.0]}, 8 / 3),
        ([1.0, 2.0, 3.0], {"sample_weight": 2.0}, 4),
        ([[1.0, 2.0], [3.0, 4.0]], {}, 5),
        ([[1.0, 2.0], [3.0, 4.0]], {"sample_weight": [1.0, 2.0]}, 8.5),
        ([[2.0, 0.5], [4.0, 1.0]], {"sample_weight": [[0.3, 0.7], [0.2, 0.8]]}, 1.275),
        (np.ones((2, 2, 2)), {}, 4),
        ([], {}, 0),
    ],
)
def test_average_loss(losses, options, expected):
    result = kd.compute_average_loss(torch.tensor(losses), **options)
    np.testing.assert_allclose(float(result), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float32])
def test_average_loss_keeps_the_dtype(dtype):
    assert kd.compute_average_loss(torch.ones(2, dtype=dtype)).dtype == dtype
    assert kd.compute_average_loss(torch.ones(2, dtype=torch.int32)).dtype == torch.float64


@pytest.mark.parametrize(
    ("losses", "options", "error", "text"),
    [
        (1.0, {}, ValueError, "Expected a tensor with at least rank 1"),
        ([1.0], {"global_batch_size": -1}, ValueError, "non-negative. Received: global_batch_size=-1"),
        ([1.0], {"global_batch_size": 2.5}, TypeError, "must be an integer. Received: global_batch_size=2.5"),
        ([1.0], {"global_batch_size": [2]}, ValueError, "must be a scalar"),
        ([1.0], {"global_batch_size": torch.tensor([2])}, ValueError, "must be a scalar"),
        ([1.0, 2.0], {"sample_weight": [1.0, 2.0, 3.0]}, ValueError, r"sample_weight of shape \(3,\)"),
    ],
)
def test_average_loss_bad_input(losses, options, error, text):
    with pytest.raises(error, match=text):
        kd.compute_average_loss(torch.tensor(losses), **options)


@pytest.mark.parametrize(
    ("parts", "options", "expected"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], {}, [0.75, 1.75]),
        ([[1.0, 2.0, 3.0], [10.0]], {}, [1.0, 5.0]),
        ([[1.0, 2.0, 3.0], [10.0]], {"global_batch_size": 4}, [1.5, 2.5]),
    ],
)
def test_average_loss_in_replicas(two, parts, options, expected):
    value = PerReplica([torch.tensor(part) for part in parts])
    result = two.run(lambda x: kd.compute_average_loss(x, **options), args=(value,))
    assert [float(v) for v in result.values] == expected


def test_regularization_loss(two):
    result = two.run(lambda: kd.scale_regularization_loss(torch.tensor([2.0, 4.0])))
    assert [float(v) for v in result.values] == [3, 3]
    assert kd.scale_regularization_loss(torch.tensor(6)).dtype == torch.float64
    assert kd.scale_regularization_loss([torch.tensor(1.0), torch.tensor(2.0)]) == 3


def test_regularization_loss_counts_once_where_a_replica_has_no_rows():
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    batch = next(iter(strategy.experimental_distribute_dataset([torch.ones(2, 1)])))
    result = strategy.run(lambda x: kd.scale_regularization_loss(torch.tensor(6.0)), args=(batch,))
    assert strategy.reduce("SUM", result, None) == 6


def test_across_replicas(two):
    with two.scope():
        for function in (kd.compute_average_loss, kd.scale_regularization_loss):
            with pytest.raises(RuntimeError, match=f"You are calling `{function.__name__}` in cross replica context"):
                function(torch.ones(2))
        assert kd.compute_average_loss(torch.ones(2), global_batch_size=2) == 1


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight", "none"])
@pytest.mark.parametrize("rows", [7, 4, 1])
def test_loss_objects_add_up_to_the_global_value(mirrored, reduction, rows):
    rng = np.random.default_rng(rows)
    y, p = torch.tensor(rng.normal(size=(rows, 3))), torch.tensor(rng.normal(size=(rows, 3)))
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    batch = next(iter(mirrored.experimental_distribute_dataset([(y, p)])))
    parts = mirrored.run(lambda pair: loss(*pair), args=(batch,))
    if reduction == "none":
        assert torch.allclose(mirrored.gather(parts, axis=0), loss(y, p))
    else:
        total = sum(v for v in mirrored.experimental_local_results(parts))
        np.testing.assert_allclose(float(total), float(loss(y, p)), rtol=1e-6)


def test_a_run_without_a_batch_scales_by_the_replicas(two):
    loss = keras.losses.MeanSquaredError()
    result = two.run(lambda: loss(torch.ones(2, 1), torch.zeros(2, 1)))
    assert [float(v) for v in result.values] == [0.5, 0.5]


def test_a_users_loss_with_another_number_of_values(two):
    """The denominator is what the loss returned, added up, not the rows."""

    def valid_only(y_true, y_pred):
        return torch.square(y_pred - y_true)[y_true > 0]

    class ValidOnly(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return valid_only(y_true, y_pred)

    loss = ValidOnly()
    y = torch.tensor([1.0, -1.0, 2.0, 3.0, -2.0])
    p = torch.arange(5.0)
    batch = next(iter(two.experimental_distribute_dataset([(y, p)])))
    parts = two.run(lambda pair: loss(*pair), args=(batch,))
    np.testing.assert_allclose(float(sum(parts.values)), float(loss(y, p)), rtol=1e-6)


def test_outside_of_replicas_keras_is_itself():
    loss = keras.losses.MeanSquaredError()
    assert float(loss(torch.ones(2, 1), torch.zeros(2, 1))) == 1

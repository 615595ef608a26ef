"""What needs a GPU: one run of under 3 minutes on one GPU, `pytest -m gpu tests/gpu`.

Several logical GPUs share the one that is there.
"""

import keras
import numpy as np
import pytest
import torch

import keras_distrib as kd
from keras_distrib.comm.cross_device_ops import NcclAllReduce
from keras_distrib.data.split import split_batch
from keras_distrib.options import ReduceOp
from keras_distrib.testing import compare, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(50, 8, 8, 1)).astype("float32"), RNG.integers(0, 4, size=(50,))


def convnet():
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


@pytest.fixture(autouse=True)
def exact_float32():
    """Tensor cores' rounding is not what is tested here."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("kind", [kd.MirroredStrategy, kd.experimental.CentralStorageStrategy])
def test_logical_gpus_equal_one(kind, replicas):
    """Needs KERAS_DISTRIB_LOGICAL_DEVICES=gpu:0=3; CentralStorage keeps variables on the CPU."""
    if len(kd.config.list_logical_devices("GPU")) < replicas:
        pytest.skip("set KERAS_DISTRIB_LOGICAL_DEVICES=cpu=5,gpu:0=3")
    options = {"batch_size": 16, "epochs": 2, "seed": 0}
    reference = train(convnet, (X, Y), None, **options)
    noisy = train(convnet, (X, Y), None, in_two_parts=True, **options)
    strategy = kind([f"gpu:{index}" for index in range(replicas)])
    report = compare(reference, noisy, train(convnet, (X, Y), strategy, **options), replicas)
    assert report.worst <= 1.0, str(report)


def test_collectives_and_their_gradients_on_a_shared_gpu():
    strategy = kd.MirroredStrategy(["gpu:0", "gpu:1"])

    def step():
        x = torch.tensor(1.0 + 4 * kd.get_replica_context().replica_id_in_sync_group, device="cuda", requires_grad=True)
        total = kd.get_replica_context().all_reduce("SUM", x**2)
        return torch.autograd.grad(total, x)[0]

    assert [float(v) for v in strategy.run(step).values] == [4.0, 20.0]


def test_batches_that_are_read_ahead_arrive_whole():
    """Copies run on a stream of their own; a step must wait for them."""
    strategy = kd.MirroredStrategy(["gpu:0", "gpu:1"])
    batches = [torch.full((2**22,), float(index)) for index in range(20)]
    sums = []
    for batch in strategy.experimental_distribute_dataset(batches):
        assert all(value.is_cuda for value in batch.values)
        sums.append(float(strategy.reduce("SUM", strategy.run(lambda x: x.mean(), args=(batch,)), axis=None)))
    assert sums == [2.0 * index for index in range(20)]


def test_batches_are_copied_from_pinned_memory():
    strategy = kd.MirroredStrategy(["gpu:0", "gpu:1"])
    parts, rows = split_batch(torch.arange(5), strategy.devices)
    assert rows == 5
    assert all(value.is_cuda for value in parts.values)
    assert torch.cat(parts.values).tolist() == list(range(5))


def test_one_device_strategy_places_variables():
    with kd.OneDeviceStrategy("gpu:0").scope():
        assert keras.Variable(1.0).value.is_cuda


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("packs", [1, 2])
def test_nccl(packs):
    lists = [[torch.full((n,), float(r + n), device=f"cuda:{r}") for n in (1, 5, 2)] for r in range(2)]
    results = NcclAllReduce(packs).all_reduce(ReduceOp.SUM, lists)
    for rank, tensors in enumerate(results):
        for n, tensor in zip((1, 5, 2), tensors, strict=True):
            assert tensor.device.index == rank
            assert tensor.tolist() == [2.0 * n + 1] * n

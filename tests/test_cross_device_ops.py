"""Cross-device operations: the built-in ones agree, and a user's own is what a strategy uses."""

import keras
import numpy as np
import pytest
import torch

import keras_distrib as kd
from keras_distrib.values import Mirrored, PerReplica

BUILT_IN = {
    "one device": lambda: kd.ReductionToOneDevice(),
    "another device": lambda: kd.ReductionToOneDevice(reduce_to_device="cpu:3"),
    "accumulation_fn": lambda: kd.ReductionToOneDevice(accumulation_fn=lambda tensors: sum(tensors[1:], tensors[0])),
    "hierarchical": lambda: kd.HierarchicalCopyAllReduce(),
    "hierarchical, 3 packs": lambda: kd.HierarchicalCopyAllReduce(num_packs=3),
    "hierarchical, no packs": lambda: kd.HierarchicalCopyAllReduce(num_packs=0),
    "nccl": lambda: kd.NcclAllReduce(num_packs=2),
}


@pytest.fixture(params=BUILT_IN)
def ops(request):
    return BUILT_IN[request.param]()


def floats(value):
    return [float(part) for part in value.values]


class TestBuiltIn:
    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    def test_sums_and_means(self, ops, count):
        generator = np.random.default_rng(count)
        shapes = [(3, 2), (), (0, 4), (7,), (2, 2)]
        dtypes = ["float32", "float32", "float64", "float32", "int32"]
        pairs = zip(shapes, dtypes, strict=True)
        arrays = [generator.normal(size=(count, *shape)).__mul__(9).astype(dtype) for shape, dtype in pairs]
        values = [PerReplica([torch.tensor(part) for part in array]) for array in arrays]
        results = ops.batch_reduce(kd.ReduceOp.SUM, [(value, value) for value in values])
        for array, result in zip(arrays, results, strict=True):
            for part in result.values if count > 1 else [result]:
                np.testing.assert_allclose(part, array.sum(0), rtol=1e-5, atol=1e-5)
                assert part.numpy().dtype == array.dtype
        mean = ops.reduce("mean", values[0], "cpu:0")
        np.testing.assert_allclose(mean, arrays[0].mean(0), rtol=1e-5)

    def test_destinations(self, ops):
        value = PerReplica([torch.tensor(1.0), torch.tensor(2.0)])
        assert float(ops.reduce("sum", value, "cpu:1")) == 3.0
        assert isinstance(ops.reduce("sum", value, value), Mirrored)
        assert floats(ops.reduce("sum", torch.tensor(2.0), value)) == [2.0, 2.0]
        assert floats(ops.broadcast(torch.tensor(2.0), value)) == [2.0, 2.0]
        both = ops.batch_reduce(kd.ReduceOp.SUM, [(value, value), (value, "cpu:0")])
        assert floats(both[0]) == [3.0, 3.0]
        assert float(both[1]) == 3.0
        assert ops.batch_reduce(kd.ReduceOp.SUM, []) == []

    def test_pairs_of_different_numbers_of_replicas(self, ops):
        two, three = PerReplica([torch.tensor(1.0)] * 2), PerReplica([torch.tensor(1.0)] * 3)
        results = ops.batch_reduce("sum", [(two, "cpu:0"), (three, "cpu:0"), (two, three)])
        assert [float(results[0]), float(results[1]), floats(results[2])] == [2.0, 3.0, [2.0] * 3]

    def test_a_replica_without_rows_does_not_count(self, ops):
        value = PerReplica([torch.tensor(1.0), torch.tensor(3.0), torch.tensor(0.0)], rows=[2, 1, 0])
        assert float(ops.reduce("mean", value, "cpu:0")) == 2.0

    def test_sparse_values(self, ops):
        def sparse(rows, values):
            return torch.sparse_coo_tensor([rows], values, size=(5, 2), check_invariants=True)

        value = PerReplica([sparse([1], [[1.0, 2.0]]), sparse([1, 3], [[3.0, 4.0], [5.0, 6.0]])])
        total, mean = ops.reduce("sum", value, "cpu:0"), ops.reduce("mean", value, "cpu:0")
        assert total.is_sparse
        assert total.to_dense()[[1, 3]].tolist() == [[4.0, 6.0], [5.0, 6.0]]
        assert mean.to_dense()[[1, 3]].tolist() == [[2.0, 3.0], [2.5, 3.0]]

    def test_integers_and_bools(self, ops):
        assert ops.reduce("mean", PerReplica([torch.tensor(1), torch.tensor(4)]), "cpu:0").dtype is torch.float64
        assert int(ops.reduce("sum", PerReplica([torch.tensor(True), torch.tensor(True)]), "cpu:0")) == 2

    @pytest.mark.parametrize("replicas", [2, 3, 5])
    def test_training_with_it(self, ops, replicas):
        x = np.random.default_rng(0).normal(size=(11, 3)).astype("float32")

        def train(strategy):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(x, x.sum(1), batch_size=4, epochs=2, shuffle=False, verbose=0)
            return model.get_weights()

        devices = [f"cpu:{index}" for index in range(replicas)]
        for own, expected in zip(
            train(kd.MirroredStrategy(devices, cross_device_ops=ops)), train(kd.get_strategy()), strict=True
        ):
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


def test_the_accumulation_fn_gets_one_tensor_per_replica():
    seen = []

    def largest(tensors):
        seen.append([float(tensor) for tensor in tensors])
        return torch.stack(tensors).amax(0)

    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"], kd.ReductionToOneDevice(accumulation_fn=largest))
    value = strategy.run(lambda: torch.tensor(1.0 + kd.get_replica_context().replica_id_in_sync_group))
    assert float(strategy.reduce("SUM", value, axis=None)) == 2.0
    assert seen == [[1.0, 2.0]]


class Recording(kd.CrossDeviceOps):
    """What a user writes: only the one method that has to be there."""

    def __init__(self):
        self.reduced = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.reduced.append((reduce_op.name, len(per_replica_value.values)))
        total = sum(per_replica_value.values)
        total = total / len(per_replica_value.values) if reduce_op is kd.ReduceOp.MEAN else total
        return self.broadcast(total, destinations)


class TestUsersOwn:
    def test_everything_goes_through_it(self):
        ops = Recording()
        strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
        value = strategy.run(lambda: torch.tensor(1.0 + kd.get_replica_context().replica_id_in_sync_group))
        assert float(strategy.reduce("SUM", value, axis=None)) == 3.0
        assert float(strategy.extended.reduce_to("MEAN", value, "cpu:0")) == 1.5
        all_reduced = strategy.run(lambda x: kd.get_replica_context().all_reduce("sum", x), args=(value,))
        assert floats(all_reduced) == [3.0, 3.0]
        assert ops.reduced == [("SUM", 2), ("MEAN", 2), ("SUM", 2)]

    def test_gradients_go_through_it(self):
        ops = Recording()
        strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(np.ones((2, 1)), np.zeros((2, 1)), batch_size=2, verbose=0)
        assert ops.reduced == [("MEAN", 2)] * 2  # the kernel's and the bias', by equal shares
        assert model.get_weights()[0][0, 0] == pytest.approx(0.8)

    def test_an_overridden_batch_method_is_used_for_gradients(self):
        batches = []

        class Batched(kd.ReductionToOneDevice):
            def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
                batches.append(len(value_destination_pairs))
                return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)

        strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=Batched())
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((2, 1)), np.zeros((2, 1)), batch_size=2, verbose=0)
        assert batches == [2]

    def test_a_base_class_alone_says_what_to_override(self):
        with pytest.raises(NotImplementedError, match="must override `reduce_implementation`"):
            kd.CrossDeviceOps().reduce("sum", PerReplica([torch.ones(1), torch.ones(1)]), "cpu:0")


class TestErrors:
    def test_destinations(self, ops):
        value = PerReplica([torch.tensor(1.0), torch.tensor(2.0)])
        with pytest.raises(ValueError, match="destinations can not be empty"):
            ops.reduce("sum", value, "")
        with pytest.raises(ValueError, match=r"destinations must be one of .* Received: destinations=\['cpu:0'\]"):
            ops.broadcast(torch.tensor(1.0), ["cpu:0"])
        with pytest.raises(ValueError, match="gpu:7"):
            ops.reduce("sum", value, "gpu:7")

    def test_operations_and_pairs(self, ops):
        value = PerReplica([torch.tensor(1.0), torch.tensor(2.0)])
        with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
            ops.reduce("max", value, "cpu:0")
        with pytest.raises(ValueError, match="Each element of `value_destination_pairs` should be a tuple"):
            ops.batch_reduce("sum", [value])
        with pytest.raises(ValueError, match="shapes by replica"):
            ops.reduce("sum", PerReplica([torch.ones(2), torch.ones(3)]), "cpu:0")

    @pytest.mark.parametrize("kind", [kd.HierarchicalCopyAllReduce, kd.NcclAllReduce])
    def test_packs(self, kind):
        with pytest.raises(ValueError, match=r"requires num_packs >= 0, but -1 is specified. Received: num_packs=-1"):
            kind(num_packs=-1)

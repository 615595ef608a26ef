"""`strategy.extended`, with the values that the original gives."""

import keras
import pytest
import torch

import keras_distrib as kd
from keras_distrib.values import Mirrored


@pytest.fixture
def central():
    return kd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:2")


@pytest.fixture
def one():
    return kd.OneDeviceStrategy("cpu:0")


def per_replica(strategy, *values):
    made = [torch.tensor(float(value)) for value in values]
    return strategy.experimental_distribute_values_from_function(lambda c: made[c.replica_id_in_sync_group])


def variable(strategy, value=1.0, **options):
    with strategy.scope():
        return keras.Variable(value, **options)


def add(v, x):
    return v.assign_add(x)


def floats(value):
    return [float(part) for part in value.values]


class TestUpdate:
    def test_once_for_each_component(self, two):
        v = variable(two)
        assert floats(two.extended.update(v, add, args=(1.0,))) == [2.0, 2.0]
        result = two.extended.update(v, add, args=(per_replica(two, 1, 2),))
        assert isinstance(result, Mirrored)
        assert floats(result) == [3.0, 4.0]
        ungrouped = two.extended.update(v, add, kwargs={"x": 1.0}, group=False)
        assert [float(part) for part in ungrouped] == [4.0, 5.0]
        assert [float(part) for part in two.experimental_local_results(v)] == [4.0, 5.0]
        assert floats(result) == [3.0, 4.0]  # a result does not change with the variable

    def test_reads_and_writes_one_component(self, two):
        v = variable(two)
        two.extended.update(v, lambda v, x: v.assign(x), args=(per_replica(two, 3, 5),))
        assert floats(two.extended.update(v, lambda v: v.value * 10)) == [30.0, 50.0]
        assert floats(two.extended.update(v, lambda v: v + 1)) == [4.0, 6.0]
        two.extended.update(v, lambda v: v.assign_sub(v))
        assert [float(part) for part in two.experimental_local_results(v)] == [0.0, 0.0]

    def test_in_cross_replica_context(self, any_strategy):
        v = variable(any_strategy)
        seen = []

        def fn(v):
            seen.append((kd.in_cross_replica_context(), kd.get_replica_context(), kd.get_strategy() is any_strategy))

        assert any_strategy.extended.update(v, fn) is None
        assert set(seen) == {(True, None, True)}
        assert not kd.has_strategy()

    def test_a_shared_variable_once(self, central):
        v = variable(central)
        assert float(central.extended.update(v, add, args=(1.0,))) == 2.0
        assert float(central.extended.update(v, add, args=(per_replica(central, 1, 2),))) == 3.0
        (only,) = central.extended.update(v, add, args=(1.0,), group=False)
        assert float(only) == 4.0

    def test_one_device_and_no_strategy(self, one):
        v = variable(one)
        assert float(one.extended.update(v, add, args=(1.0,))) == 2.0
        plain = keras.Variable(1.0)
        assert float(kd.get_strategy().extended.update(plain, add, args=(1.0,)).detach()) == 2.0

    def test_each_aggregation(self, two):
        for aggregation in ("none", "sum", "mean", "only_first_replica"):
            for synchronization in ("on_write", "on_read"):
                v = variable(two, aggregation=aggregation, synchronization=synchronization, trainable=False)
                two.extended.update(v, add, args=(per_replica(two, 1, 2),))
                assert [float(part) for part in two.experimental_local_results(v)] == [2.0, 3.0]

    def test_from_a_replica(self, two, central, one):
        for strategy in (two, central, one):
            v = variable(strategy)
            strategy.run(lambda v=v, s=strategy: s.extended.update(v, lambda v, x: v.assign(x), args=(5.0,)))
            assert float(v.numpy()) == 5.0

    def test_what_all_return_alike(self, two):
        assert two.extended.update(variable(two), lambda v: "a") == "a"

    def test_a_variable_of_another_scope(self, two):
        with pytest.raises(ValueError, match="created in the scope.*Received: var="):
            two.extended.update(keras.Variable(1.0), add, args=(1.0,))

    def test_an_error_leaves_the_context(self, two):
        def fail(v):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            two.extended.update(variable(two), fail)
        assert not kd.has_strategy()
        assert two.run(lambda: 1) == 1


class TestReduceTo:
    def test_destinations(self, two):
        value, v = per_replica(two, 1, 2), variable(two)
        assert float(two.extended.reduce_to("sum", value, "cpu:0")) == 3.0
        assert floats(two.extended.reduce_to("SUM", value, v)) == [3.0, 3.0]
        result = two.extended.reduce_to(kd.ReduceOp.MEAN, value, value)
        assert isinstance(result, Mirrored)
        assert floats(result) == [1.5, 1.5]
        assert float(two.reduce("mean", result, axis=None)) == 1.5
        assert [floats(part) for part in two.extended.batch_reduce_to("mean", [(value, v), (value, v)])] == [
            [1.5] * 2
        ] * 2
        assert two.extended.batch_reduce_to("mean", []) == []

    def test_a_shared_variable_is_one_destination(self, central, one):
        assert float(central.extended.reduce_to("sum", per_replica(central, 1, 2), variable(central))) == 3.0
        assert float(one.extended.reduce_to("sum", torch.tensor(1.0), variable(one))) == 1.0
        assert kd.get_strategy().extended.reduce_to("sum", 2.0, "cpu:0") == 2.0

    def test_what_is_the_same_on_all(self, two):
        v = variable(two)
        assert float(two.extended.reduce_to("mean", torch.tensor(2.0), v)) == 2.0
        with pytest.raises(ValueError, match="cannot be reduced with the given reduce op ReduceOp.SUM"):
            two.extended.reduce_to("sum", torch.tensor(2.0), v)
        mirrored = two.extended.reduce_to("sum", per_replica(two, 1, 2), v)
        with pytest.raises(ValueError, match="cannot be reduced with the given reduce op ReduceOp.SUM"):
            two.reduce("sum", mirrored, axis=None)

    def test_errors(self, two):
        value = per_replica(two, 1, 2)
        with pytest.raises(ValueError, match="destinations must be one of a `DistributedValues` object"):
            two.extended.reduce_to("mean", value, ["cpu:0"])
        with pytest.raises(ValueError, match="destinations can not be empty"):
            two.extended.reduce_to("mean", value, "")
        with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
            two.extended.reduce_to("max", value, "cpu:0")
        with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
            two.run(lambda: two.extended.reduce_to("sum", torch.tensor(5.0), "cpu:0"))
        with pytest.raises(ValueError, match="Each element of `value_destination_pairs` should be a tuple"):
            two.extended.batch_reduce_to("sum", [value])


class TestColocation:
    def test_needs_the_scope_and_a_variable_of_it(self, any_strategy):
        v = variable(any_strategy)
        with pytest.raises(RuntimeError, match='Need to be inside "with strategy.scope'):
            any_strategy.extended.colocate_vars_with(v).__enter__()
        with any_strategy.scope():
            with any_strategy.extended.colocate_vars_with(v):
                other = keras.Variable(2.0)
            with pytest.raises(ValueError, match="must only be passed a variable created in this"):
                any_strategy.extended.colocate_vars_with(3).__enter__()
        assert [part.device for part in other.components] == [part.device for part in v.components]


class TestContainers:
    def test_components_lead_to_their_variable(self, any_strategy):
        v = variable(any_strategy)
        parts = any_strategy.experimental_local_results(v)
        assert len(parts) == len(v.stored)
        assert all(any_strategy.extended.value_container(part) is v for part in parts)
        assert any_strategy.extended.value_container(3) == 3
        tensor = torch.tensor(1.0)
        assert any_strategy.extended.value_container(tensor) is tensor

    def test_local_results_are_live(self, two):
        v = variable(two)
        two.extended.update(v, lambda v, x: v.assign(x), args=(per_replica(two, 3, 5),))
        assert [float(part) for part in two.experimental_local_results(v)] == [3.0, 5.0]
        assert two.experimental_local_results({"v": v})[1]["v"] is v

    def test_variable_created_in_scope(self, two, one):
        v, plain = variable(two), keras.Variable(1.0)
        assert two.extended.variable_created_in_scope(v)
        assert not one.extended.variable_created_in_scope(v)
        assert not two.extended.variable_created_in_scope(plain)
        default = kd.get_strategy().extended
        assert default.variable_created_in_scope(plain)
        assert not default.variable_created_in_scope(v)
        assert not two.extended.variable_created_in_scope(3)


def test_devices(two, central, one):
    assert two.extended.worker_devices == two.extended.parameter_devices == ("cpu:0", "cpu:1")
    assert central.extended.worker_devices == ("cpu:0", "cpu:1")
    assert central.extended.parameter_devices == ("cpu:2",)
    assert one.extended.worker_devices == ("cpu:0",)
    assert two.extended.experimental_require_static_shapes is False
    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match=r"worker_devices\(\) method unsupported by default"):
            getattr(kd.get_strategy().extended, name)


def test_the_sum_of_a_variable(two):
    v = variable(two, 1.0)
    assert float(two.reduce("sum", v, axis=None)) == 2.0
    assert float(two.reduce("mean", v, axis=None)) == 1.0
    counter = variable(two, 1.0, synchronization="on_read", aggregation="sum")
    assert float(two.reduce("sum", counter, axis=None)) == float(counter.numpy()) == 2.0

"""Scopes, contexts and the default strategy."""

import copy
import pickle
import threading

import keras
import pytest

import keras_distrib as kd


def test_the_default_strategy_is_a_singleton_that_passes_through():
    strategy = kd.get_strategy()
    assert strategy is kd.get_strategy()
    assert not kd.has_strategy()
    assert not kd.in_cross_replica_context()
    context = kd.get_replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert strategy.run(lambda x, y=0: x + y, args=(1,), kwargs={"y": 2}) == 3
    with strategy.scope() as entered:
        assert entered is strategy
        assert type(keras.Variable(1.0)) is keras.Variable
        assert not kd.in_cross_replica_context()
    data = [1, 2]
    assert strategy.experimental_distribute_dataset(data) is data


def test_scope(two):
    with two.scope() as entered:
        assert entered is two
        assert kd.get_strategy() is two
        assert kd.has_strategy()
        assert kd.in_cross_replica_context()
        assert kd.get_replica_context() is None
    assert not kd.has_strategy()


def test_a_scope_may_be_entered_again(two):
    with two.scope(), two.scope():
        assert kd.get_strategy() is two
        with two.scope():
            pass
        assert kd.get_strategy() is two


def test_another_strategy_is_refused_and_nothing_is_left(two):
    other = kd.OneDeviceStrategy("cpu:0")
    with two.scope():
        for refused in (lambda: other.scope().__enter__(), lambda: other.run(lambda: 1)):
            with pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
                refused()
        with pytest.raises(RuntimeError, match="Must not nest tf.distribute.Strategy scopes"):
            kd.get_strategy.__globals__["_default"][0].strategy.scope().__enter__()
        assert kd.get_strategy() is two
    with other.scope():
        assert kd.get_strategy() is other


def test_run_sees_a_replica_context(two):
    def step():
        assert kd.has_strategy()
        assert kd.get_strategy() is two
        assert not kd.in_cross_replica_context()
        context = kd.get_replica_context()
        assert context.strategy is two
        assert context.num_replicas_in_sync == 2
        with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
            two.scope().__enter__()

    two.run(step)
    names = two.run(lambda: list(kd.get_replica_context().devices))
    assert names[0].values == ("cpu:0", "cpu:1")


def test_leaving_scopes_out_of_order(two):
    first, second = two.scope(), two.scope()
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="scope nesting error"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)


def test_set_strategy(two):
    other = kd.OneDeviceStrategy("cpu:0")
    try:
        kd.experimental_set_strategy(two)
        assert kd.get_strategy() is two
        assert kd.in_cross_replica_context()
        assert type(keras.Variable(1.0)).__name__ == "MirroredVariable"
        kd.experimental_set_strategy(other)
        assert kd.get_strategy() is other
        with other.scope(), pytest.raises(RuntimeError, match="Must not be called inside a"):
            kd.experimental_set_strategy(None)
    finally:
        kd.experimental_set_strategy(None)
    assert not kd.has_strategy()
    with two.scope():
        for strategy in (None, two):
            with pytest.raises(RuntimeError, match="Must not be called inside a `tf.distribute.Strategy` scope"):
                kd.experimental_set_strategy(strategy)


def test_scopes_are_of_their_thread(two):
    seen = []
    with two.scope():
        thread = threading.Thread(target=lambda: seen.append(kd.has_strategy()))
        thread.start()
        thread.join(timeout=10)
    assert seen == [False]


def test_copies(two):
    with pytest.raises(RuntimeError, match="Must only deepcopy DistributionStrategy"):
        copy.copy(two)
    assert copy.deepcopy(two) is two
    with pytest.raises(RuntimeError, match="singleton"):
        copy.deepcopy(kd.get_strategy())
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(two)


def test_one_device_strategy_never_gives_per_replica_values():
    strategy = kd.OneDeviceStrategy("cpu:1")
    assert strategy.run(lambda: [1, {"a": 2}]) == [1, {"a": 2}]
    batch = next(iter(strategy.experimental_distribute_dataset([keras.ops.ones((4, 2))])))
    assert strategy.experimental_local_results(batch)[0].shape == (4, 2)

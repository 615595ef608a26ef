"""`Strategy.run`, `merge_call`, collectives, `reduce` and `gather`."""

import gc
import random
import sys
import threading
import time

import keras
import numpy as np
import pytest
import torch

import keras_distrib as kd
from keras_distrib.values import PerReplica


def replica_id() -> int:
    return kd.get_replica_context().replica_id_in_sync_group


def values_of(strategy, fn):
    """A per-replica value of `fn(replica_id)`."""
    return strategy.experimental_distribute_values_from_function(lambda c: fn(c.replica_id_in_sync_group))


class TestRun:
    def test_each_replica_sees_its_id_once(self, mirrored):
        seen = mirrored.run(lambda: torch.tensor(replica_id()))
        assert [int(v) for v in mirrored.experimental_local_results(seen)] == list(range(mirrored.num_replicas_in_sync))

    def test_args_kwargs_and_structures(self, two):
        x = PerReplica([torch.tensor(1.0), torch.tensor(2.0)])
        result = two.run(lambda a, b: {"a": 2 * a, "b": [a + b, (a, None)]}, args=(x,), kwargs={"b": 10})
        assert [v["a"] for v in two.experimental_local_results(result)] == [2, 4]
        assert [float(v) for v in result["b"][0].values] == [11, 12]
        assert isinstance(result["b"][1], tuple)
        assert result["b"][1][1] is None

    def test_nested_per_replica_arguments_are_split(self, two):
        x = {"k": [PerReplica([torch.tensor(1.0), torch.tensor(5.0)])]}
        result = two.run(lambda d: d["k"][0] * 2, args=(x,))
        assert [float(v) for v in result.values] == [2, 10]

    def test_identical_objects_come_bare_and_all_none_is_none(self, two):
        shared = torch.tensor(1.0)
        assert two.run(lambda: shared) is shared
        assert two.run(lambda: 3) == 3
        assert two.run(lambda: None) is None

    def test_namedtuple_and_dict_keep_their_types(self, two):
        from collections import OrderedDict, namedtuple

        Point = namedtuple("Point", "x y")
        result = two.run(lambda: OrderedDict(p=Point(torch.tensor(replica_id()), 1)))
        assert isinstance(result, OrderedDict)
        assert isinstance(result["p"], Point)
        assert [int(v) for v in result["p"].x.values] == [0, 1]

    def test_one_device_gives_plain_values(self):
        strategy = kd.MirroredStrategy(["cpu:0"])
        assert isinstance(strategy.run(lambda: torch.tensor(1.0)), torch.Tensor)

    def test_different_structures_are_refused(self, two):
        with pytest.raises(ValueError, match="same structure.*lengths"):
            two.run(lambda: [1] * (replica_id() + 1))
        with pytest.raises(ValueError, match="same structure.*keys"):
            two.run(lambda: {replica_id(): 1})

    @pytest.mark.parametrize("args", [torch.tensor(1.0), "abc", {"a": 1}])
    def test_args_must_be_a_sequence(self, two, args):
        with pytest.raises(ValueError, match="positional args must be a list or tuple.*Received: args"):
            two.run(lambda x: x, args=args)

    def test_run_within_run_is_refused(self, two):
        with pytest.raises(RuntimeError, match="requires being in cross-replica context.*merge_call"):
            two.run(lambda: two.run(lambda: 1))

    def test_run_within_merge_call_works(self, two):
        def step():
            return kd.get_replica_context().merge_call(lambda s: s.run(lambda: torch.tensor(replica_id() + 10)))

        assert [int(v) for v in two.run(step).values] == [10, 11]

    def test_run_from_several_threads_at_once(self, two):
        results = {}

        def work(number):
            for _ in range(20):
                out = two.run(lambda: torch.tensor(number + replica_id()))
                results.setdefault(number, []).append([int(v) for v in out.values])

        threads = [threading.Thread(target=work, args=(n,)) for n in (0, 100, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert {n: r == [[n, n + 1]] * 20 for n, r in results.items()} == {0: True, 100: True, 200: True}

    def test_grad_mode_and_dtype_policy_reach_the_replicas(self, two):
        with torch.no_grad():
            assert two.run(torch.is_grad_enabled) is False
        keras.config.set_floatx("float32")
        with keras.name_scope("outer"):
            paths = two.run(lambda: keras.Variable(1.0, name="v").path)
        assert paths.startswith("outer/")

    def test_a_counted_batch_tells_rows(self, two):
        batch = next(iter(two.experimental_distribute_dataset([torch.arange(7)])))

        def step(x):
            context = kd.get_replica_context()
            return torch.tensor([context.rows, context.global_rows, len(x)])

        rows = [v.tolist() for v in two.run(step, args=(batch,)).values]
        assert rows == [[4, 7, 4], [3, 7, 3]]
        assert two.run(lambda: kd.get_replica_context().rows) is None

    def test_a_replica_without_rows_does_not_run(self):
        strategy = kd.MirroredStrategy([f"cpu:{i}" for i in range(5)])
        batch = next(iter(strategy.experimental_distribute_dataset([torch.arange(4.0)])))
        ran = []

        def step(x):
            ran.append(replica_id())
            return x.sum(), x

        total, rows = strategy.run(step, args=(batch,))
        assert sorted(ran) == [0, 1, 2, 3]
        assert strategy.reduce("SUM", total, axis=None) == 6
        assert strategy.reduce("MEAN", total, axis=None) == 1.5
        assert strategy.gather(rows, axis=0).tolist() == [0, 1, 2, 3]
        assert rows.values[4].shape == (0,)

    def test_one_row_over_two_replicas_stays_per_replica(self, two):
        batch = next(iter(two.experimental_distribute_dataset([torch.ones(1, 3)])))
        result = two.run(lambda x: x.sum(), args=(batch,))
        assert isinstance(result, PerReplica)
        assert two.reduce("SUM", result, axis=None) == 3


class TestFailures:
    def test_exception_keeps_type_traceback_and_names_the_replica(self, two):
        class MyError(Exception):
            pass

        def step():
            if replica_id() == 1:
                raise MyError("boom")
            kd.get_replica_context().all_reduce("SUM", torch.tensor(1.0))

        with pytest.raises(MyError, match="boom") as caught:
            two.run(step)
        assert "replica 1 of 2 (cpu:1)" in "".join(caught.value.__notes__)
        frames = [entry.name for entry in caught.traceback]
        assert "step" in frames
        assert two.run(lambda: torch.tensor(replica_id())).values[1] == 1  # still usable

    def test_exception_in_and_after_a_merge(self, two):
        def in_merge(strategy):
            raise KeyError("in merge")

        with pytest.raises(KeyError, match="in merge"):
            two.run(lambda: kd.get_replica_context().merge_call(in_merge))

        def after():
            kd.get_replica_context().merge_call(lambda strategy: None)
            raise IndexError("after")

        with pytest.raises(IndexError, match="after"):
            two.run(after)

    def test_swallowing_exceptions_does_not_hide_the_stop(self, two):
        def step():
            if replica_id() == 0:
                raise ValueError("first")
            for _ in range(3):
                try:
                    kd.get_replica_context().all_reduce("SUM", torch.tensor(1.0))
                except Exception:  # noqa: BLE001, S110 - what a careless user writes
                    pass

        with pytest.raises(ValueError, match="first"):
            two.run(step)

    def test_different_number_of_merge_calls(self, two):
        def step():
            if replica_id() == 0:
                kd.get_replica_context().merge_call(lambda strategy: None)

        with pytest.raises(RuntimeError, match="Some replicas made a different number of"):
            two.run(step)

    def test_different_collectives(self, two):
        def step():
            context = kd.get_replica_context()
            if replica_id() == 0:
                context.all_reduce("SUM", torch.ones(2))
            else:
                context.all_gather(torch.ones(2), axis=0)

        with pytest.raises(RuntimeError, match="same order.*all_reduce.*all_gather|same order.*all_gather.*all_reduce"):
            two.run(step)

    def test_a_replica_that_never_comes_is_named(self, two, monkeypatch):
        monkeypatch.setenv("KERAS_DISTRIB_TIMEOUT_SECONDS", "0.2")

        def step():
            if replica_id() == 1:
                time.sleep(1.0)
            kd.get_replica_context().all_reduce("SUM", torch.tensor(1.0))

        with pytest.raises(TimeoutError, match=r"Replica 0 in all_reduce\(SUM\) has waited .* for replica\(s\) \[1\]"):
            two.run(step)

    def test_a_thousand_random_failures_do_not_hang(self):
        strategy = kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
        generator = random.Random(0)
        for number in range(1000):
            failing, at = generator.randrange(3), generator.randrange(4)

            def step(failing=failing, at=at, number=number):
                context = kd.get_replica_context()
                for point in range(4):
                    if replica_id() == failing and point == at:
                        raise ArithmeticError(number)
                    if point % 2:
                        context.merge_call(lambda strategy: None)
                    else:
                        context.all_reduce("SUM", torch.tensor(1.0))

            with pytest.raises(ArithmeticError) as caught:
                strategy.run(step)
            assert caught.value.args == (number,)
            assert f"replica {failing} of 3" in caught.value.__notes__[0]
        names = [t.name for t in threading.enumerate() if t.name.startswith("keras_distrib MirroredStrategy")]
        assert len(names) == 3

    def test_no_thread_is_left_when_the_strategy_goes(self):
        before = threading.active_count()
        strategy = kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
        strategy.run(lambda: torch.tensor(replica_id()))
        assert threading.active_count() == before + 3
        del strategy
        gc.collect()
        assert threading.active_count() == before

    def test_replicas_share_the_cores_and_the_caller_keeps_its_own(self, two):
        before = torch.get_num_threads()
        torch.set_num_threads(4)
        try:
            assert two.run(torch.get_num_threads) == 2
            assert torch.get_num_threads() == 4
            seen = []
            thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            thread.start()
            thread.join(timeout=10)
            assert seen == [4]  # and so do threads to come
            torch.set_num_threads(6)
            assert two.run(torch.get_num_threads) == 3
        finally:
            torch.set_num_threads(before)

    def test_interrupt_in_the_calling_thread_leaves_the_strategy_usable(self, two):
        import _thread

        def step():
            if replica_id() == 0:
                _thread.interrupt_main()
            time.sleep(0.3)
            kd.get_replica_context().all_reduce("SUM", torch.tensor(1.0))

        with pytest.raises(KeyboardInterrupt):
            two.run(step)
            time.sleep(1)
        assert two.run(lambda: torch.tensor(replica_id())).values[1] == 1


class TestMergeCall:
    def test_arguments_are_per_replica_and_results_are_handed_back(self, two):
        def merge(strategy, x, shared, *, key):
            assert kd.in_cross_replica_context()
            assert kd.get_replica_context() is None
            assert kd.get_strategy() is strategy
            assert shared == "same"
            return PerReplica([v * 10 for v in x.values]), key

        def step():
            mine, key = kd.get_replica_context().merge_call(
                merge, args=(torch.tensor(replica_id() + 1), "same"), kwargs={"key": 7}
            )
            return mine, torch.tensor(key)

        mine, _ = two.run(step)
        assert [int(v) for v in mine.values] == [10, 20]

    def test_runs_once(self, mirrored):
        calls = []
        mirrored.run(lambda: kd.get_replica_context().merge_call(lambda strategy: calls.append(1)))
        assert calls == [1]

    def test_default_context_runs_at_once(self):
        def merge(strategy, x):
            assert kd.in_cross_replica_context()
            assert not kd.has_strategy()
            return x + 1

        assert kd.get_replica_context().merge_call(merge, args=(1,)) == 2
        assert not kd.in_cross_replica_context()

    def test_stale_contexts_are_refused(self, two):
        kept = []
        two.run(lambda: kept.append(kd.get_replica_context()))
        with pytest.raises(RuntimeError, match=r"Mismatching tf.distribute.Strategy objects"):
            kept[0].merge_call(lambda strategy: None)
        with two.scope(), pytest.raises(RuntimeError, match="Need to be inside `call_for_each_replica"):
            kept[0].merge_call(lambda strategy: None)
        with pytest.raises(RuntimeError, match="Mismatching ReplicaContext"):
            two.run(lambda: kept[0].merge_call(lambda strategy: None))


class TestCollectives:
    def test_all_reduce(self, mirrored):
        n = mirrored.num_replicas_in_sync

        def step():
            context = kd.get_replica_context()
            x = torch.tensor([float(replica_id()), 1.0])
            return context.all_reduce("SUM", x), context.all_reduce(kd.ReduceOp.MEAN, {"a": x, "b": [x]})

        total, mean = mirrored.run(step)
        for value in mirrored.experimental_local_results(total):
            assert value.tolist() == [n * (n - 1) / 2, n]
        for value in mirrored.experimental_local_results(mean["b"][0]):
            assert value.tolist() == [(n - 1) / 2, 1]

    def test_integers_sum_exactly_and_average_as_float64(self, two):
        def step():
            context = kd.get_replica_context()
            x = torch.tensor(1 + 3 * replica_id(), dtype=torch.int32)
            return context.all_reduce("SUM", x), context.all_reduce("MEAN", x)

        total, mean = two.run(step)
        assert total.values[0].dtype == torch.int32
        assert int(total.values[1]) == 5
        assert mean.values[0].dtype == torch.float64
        assert float(mean.values[1]) == 2.5

    def test_a_tensor_that_replicas_share_is_summed_too(self, two):
        shared = torch.tensor(2.0)
        result = two.run(lambda: kd.get_replica_context().all_reduce("SUM", shared))
        assert [float(v) for v in two.experimental_local_results(result)] == [4.0, 4.0]

    def test_numbers_and_mixed_dtypes(self, two):
        result = two.run(lambda: kd.get_replica_context().all_reduce("SUM", [1.5, torch.tensor(2)]))
        assert float(result[0].values[0]) == 3.0
        assert int(result[1].values[0]) == 4

    def test_results_may_be_written_to(self, two):
        def step():
            result = kd.get_replica_context().all_reduce("SUM", torch.ones(2))
            result += replica_id() + 1
            return result

        assert [v.tolist() for v in two.run(step).values] == [[3, 3], [4, 4]]

    @pytest.mark.parametrize(("op", "y", "dx"), [("SUM", (26, 52), (6, 30)), ("MEAN", (13, 26), (3, 15))])
    def test_gradient_of_all_reduce(self, two, op, y, dx):
        """Golden values: semantics of the original for x = 1, 5 and y_r = (r + 1) all_reduce(x ** 2)."""

        def step():
            x = torch.tensor(1.0 + 4 * replica_id(), requires_grad=True)
            out = (replica_id() + 1) * kd.get_replica_context().all_reduce(op, x**2)
            (gradient,) = torch.autograd.grad(out, x)
            return out.detach(), gradient

        out, gradient = two.run(step)
        assert tuple(float(v) for v in out.values) == y
        assert tuple(float(v) for v in gradient.values) == dx

    def test_gradient_of_all_gather(self, two):
        """Golden values: [1, 2, 3] and [10], y_r = (r + 1) sum(gathered ** 2)."""

        def step():
            x = torch.tensor([1.0, 2.0, 3.0] if replica_id() == 0 else [10.0], requires_grad=True)
            gathered = kd.get_replica_context().all_gather(x, axis=0)
            (gradient,) = torch.autograd.grad((replica_id() + 1) * (gathered**2).sum(), x)
            return gathered.detach(), gradient

        gathered, gradient = two.run(step)
        assert [v.tolist() for v in gathered.values] == [[1, 2, 3, 10]] * 2
        assert [v.tolist() for v in gradient.values] == [[6, 12, 18], [60]]

    def test_all_gather_axes_and_nests(self, two):
        def step():
            r = replica_id()
            return kd.get_replica_context().all_gather([torch.full((2, r + 1), r), torch.full((2, 1), r)], axis=1)

        first, second = two.run(step)
        assert first.values[0].tolist() == [[0, 1, 1], [0, 1, 1]]
        assert second.values[1].tolist() == [[0, 1], [0, 1]]

    @pytest.mark.parametrize(
        ("value", "axis", "error", "text"),
        [
            (lambda r: torch.tensor(1.0), 0, ValueError, "`axis` must be an integer"),
            (lambda r: torch.ones(2), -1, ValueError, "Received: axis=-1"),
            (lambda r: torch.ones(2), 1, ValueError, "Received: axis=1"),
            (lambda r: torch.ones(2, r + 1), 0, ValueError, "Shape mismatch"),
            (lambda r: torch.ones(2).to_sparse(), 0, NotImplementedError, "all_gather does not support IndexedSlices"),
        ],
    )
    def test_bad_gathers(self, two, value, axis, error, text):
        with pytest.raises(error, match=text):
            two.run(lambda: kd.get_replica_context().all_gather(value(replica_id()), axis))

    def test_bad_reductions(self, two):
        with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
            two.run(lambda: kd.get_replica_context().all_reduce("max", torch.ones(1)))
        with pytest.raises(TypeError, match="Expected `reduce_op`"):
            two.run(lambda: kd.get_replica_context().all_reduce(None, torch.ones(1)))
        with pytest.raises(ValueError, match="same shapes"):
            two.run(lambda: kd.get_replica_context().all_reduce("SUM", torch.ones(replica_id() + 1)))

    def test_default_strategy_passes_through(self):
        context = kd.get_replica_context()
        assert context.all_reduce("SUM", torch.tensor(2.0)) == 2
        assert context.all_gather(torch.ones(2), axis=0).tolist() == [1, 1]


class TestReduceAndGather:
    @pytest.mark.parametrize(
        ("values", "op", "axis", "expected"),
        [
            ([1.0, 5.0], "SUM", None, 6),
            ([1.0, 5.0], "mean", None, 3),
            ([[1.0, 2.0], [3.0, 4.0]], "SUM", None, [4, 6]),
            ([[1.0, 2.0], [3.0, 4.0]], "MEAN", None, [2, 3]),
            ([[1.0, 2.0], [3.0, 4.0]], "SUM", 0, 10),
            ([[1.0, 2.0], [3.0, 4.0]], "MEAN", 0, 2.5),
            ([[1.0, 2.0, 3.0], [10.0]], "SUM", 0, 16),
            ([[1.0, 2.0, 3.0], [10.0]], "MEAN", 0, 4),
            ([[1.0, 2.0], []], "SUM", 0, 3),
            ([[1.0, 2.0], []], "MEAN", 0, 1.5),
            ([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]], "MEAN", 0, [3, 4]),
            ([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]], "MEAN", (0, 1), 3.5),
            ([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]], "SUM", (0, 1), 21),
            ([[1.0, 2.0], [3.0]], "SUM", -1, 6),
        ],
    )
    def test_golden(self, two, values, op, axis, expected):
        """Golden values of the original (tf.distribute 2.21, two logical CPUs)."""
        result = two.reduce(op, PerReplica([torch.tensor(v) for v in values]), axis)
        assert result.tolist() == expected

    def test_integer_mean_is_float64(self, two):
        assert two.reduce("MEAN", PerReplica([torch.tensor(1), torch.tensor(4)]), None).dtype == torch.float64
        result = two.reduce("MEAN", PerReplica([torch.tensor([1, 2]), torch.tensor([4])]), 0)
        assert result.dtype == torch.float64
        np.testing.assert_allclose(float(result), 7 / 3)

    @pytest.mark.parametrize(
        ("value", "op", "axis", "error", "text"),
        [
            (PerReplica([torch.ones(3), torch.ones(1)]), "SUM", None, ValueError, "different shapes"),
            (PerReplica([torch.tensor(1.0)] * 2), "SUM", 0, ValueError, "out of range"),
            (PerReplica([torch.ones(2, 2), torch.ones(1, 2)]), "MEAN", 1, ValueError, "alike in all other axes"),
            (PerReplica([torch.ones(2)] * 2), "SUM", [0], TypeError, "Received: axis"),
            (PerReplica([torch.ones(2)] * 2), "max", None, ValueError, "'MAX' is not a valid ReduceOp"),
            (PerReplica([torch.ones(2)] * 2), None, 0, TypeError, "Expected `reduce_op`"),
            (torch.tensor(3.0), "SUM", None, ValueError, "A non-DistributedValues value .* cannot be reduced"),
        ],
    )
    def test_bad_input(self, two, value, op, axis, error, text):
        with pytest.raises(error, match=text):
            two.reduce(op, value, axis)

    def test_values_that_replicas_share(self, two):
        assert two.reduce("MEAN", torch.tensor(3.0), None) == 3
        assert two.reduce("SUM", torch.tensor([1.0, 2.0]), 0) == 6
        assert two.reduce("MEAN", torch.tensor([1.0, 2.0]), 0) == 1.5
        assert two.reduce("SUM", 0, None) == 0

    def test_default_strategy(self):
        strategy = kd.get_strategy()
        assert strategy.reduce("SUM", 1.0, axis=None) == 1.0
        assert strategy.reduce("SUM", torch.tensor([1.0, 2.0]), axis=0) == 3.0
        assert strategy.gather(torch.ones(1), axis=0).tolist() == [1]

    def test_not_in_a_replica(self, two):
        with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
            two.run(lambda: two.reduce("SUM", torch.ones(1), None))
        with pytest.raises(RuntimeError, match=r"get_replica_context\(\).all_gather\(\) instead"):
            two.run(lambda: two.gather(torch.ones(1), 0))

    def test_gather(self, two):
        value = PerReplica([torch.tensor([1, 2, 3]), torch.tensor([10])])
        assert two.gather({"a": value}, axis=0)["a"].tolist() == [1, 2, 3, 10]
        with pytest.raises(ValueError, match="`axis` must be"):
            two.gather(value, axis=-1)
        with pytest.raises(ValueError, match="Shape mismatch"):
            two.gather(PerReplica([torch.ones(1, 2), torch.ones(1, 3)]), axis=0)

    def test_local_results(self, two):
        assert two.experimental_local_results(3) == (3,)
        assert two.experimental_local_results(None) == (None,)
        assert two.experimental_local_results([1, 2]) == ([1, 2], [1, 2])
        nested = {"a": PerReplica([1, 2]), "b": 0}
        assert two.experimental_local_results(nested) == ({"a": 1, "b": 0}, {"a": 2, "b": 0})
        assert kd.OneDeviceStrategy("cpu:0").experimental_local_results([1, 2]) == ([1, 2],)

    def test_values_from_function(self, two):
        made = values_of(two, lambda r: {"x": r, "same": 1})
        assert made["x"].values == (0, 1)
        assert made["same"].values == (1, 1)
        one = kd.OneDeviceStrategy("cpu:0")
        assert values_of(one, lambda r: r + 5) == 5


class TestCreation:
    def test_a_variable_of_the_first_run_is_one_variable(self):
        """200 first runs while threads switch at every turn."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for attempt in range(200):
                self._first_run(attempt)
        finally:
            sys.setswitchinterval(interval)

    @staticmethod
    def _first_run(attempt):
        strategy = kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
        with strategy.scope():
            layer = keras.layers.Dense(3)
            holder = keras.layers.Layer()
        made = []

        def step(x):
            if not hasattr(holder, "own"):
                holder.own = keras.Variable(keras.random.normal((2,)), trainable=False)
            made.append(keras.Variable(1.0, name=f"v{attempt}"))
            return layer(x).sum() + holder.own.value.sum()

        strategy.run(step, args=(torch.ones(2, 4),))
        assert len(layer.weights) == 2
        assert len({id(v) for v in made}) == 1
        assert len({id(v) for v in holder.variables}) == 1
        for variable in (*layer.weights, holder.own, made[0]):
            first = variable.components[0]
            assert all(torch.equal(first, component) for component in variable.components)

    def test_layers_made_inside_the_function(self, two):
        def step():
            layer = keras.layers.Dense(2)
            layer(torch.ones(1, 3))
            return layer.kernel

        kernel = two.run(step)
        assert isinstance(kernel, keras.Variable)
        assert torch.equal(kernel.components[0], kernel.components[1])

    def test_variables_of_one_replica_alone_are_its_own(self, two):
        def step():
            return [keras.Variable(float(i)) for i in range(replica_id() + 1)][replica_id()]

        made = two.run(step)
        assert made.values[0].numpy() == 0
        assert made.values[1].numpy() == 1

"""One long process: many strategies and models, cells run again, event loops and threads."""

import asyncio
import contextlib
import gc
import resource
import threading
import weakref

import keras
import numpy as np
import pytest
from keras import layers
from strategies import close, made, scope_of, state_of, strategy_named

import keras_distrib as kd

ROWS = 13
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
FIT = {"batch_size": 6, "shuffle": False, "verbose": 0}


def small():
    norm = layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([layers.Input((4,)), layers.Dense(5, "tanh"), norm, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def reference(epochs, seed=1):
    model = made(None, small, seed)
    model.fit(X, Y, epochs=epochs, **FIT)
    return state_of(model)


def replica_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("keras_distrib")]


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Leaves what is imported out of the many collections here."""
    made(None, small).fit(X, Y, **FIT)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class TestSeveralStrategies:
    def test_one_after_another(self):
        expected = reference(2)
        for name in ("mirrored3", "central2", "one", "mirrored2", "none", "mirrored3"):
            model = made(strategy_named(name), small)
            model.fit(X, Y, epochs=2, **FIT)
            close(state_of(model), expected)
            assert not kd.has_strategy()

    def test_models_of_two_strategies_and_of_none_in_turns(self):
        expected = reference(3)
        models = [made(strategy_named(name), small) for name in ("mirrored3", "none", "central2", "mirrored2")]
        for _ in range(3):
            for model in models:
                model.fit(X, Y, **FIT)
                model.evaluate(X, Y, verbose=0)
                model.predict(X, verbose=0)
        for model in models:
            close(state_of(model), expected)

    def test_two_models_of_one_strategy_in_turns(self):
        strategy = strategy_named("mirrored3")
        models = [made(strategy, small, seed) for seed in (1, 2)]
        for _ in range(2):
            for model in models:
                model.fit(X, Y, **FIT)
        for model, seed in zip(models, (1, 2), strict=True):
            close(state_of(model), reference(2, seed))

    def test_a_strategy_on_the_same_devices_as_another_one(self):
        models = [made(strategy_named("mirrored2"), small) for _ in range(2)]
        for model in models:
            model.fit(X, Y, **FIT)
        assert models[0].distribute_strategy is not models[1].distribute_strategy
        close(state_of(models[0]), reference(1))
        close(state_of(models[1]), reference(1))


@pytest.mark.parametrize("name", ["one", "mirrored1", "mirrored2", "mirrored3", "central2"])
def test_a_second_fit_goes_on(name):
    model = made(strategy_named(name), small)
    first = model.fit(X, Y, epochs=2, **FIT)
    second = model.fit(X, Y, epochs=2, initial_epoch=1, **FIT)
    assert (first.epoch, second.epoch) == ([0, 1], [1])
    close(state_of(model), reference(3))
    model.compile("sgd", "mse")  # and compiled again, with a fresh optimizer
    model.fit(X, Y, **FIT)
    assert model.optimizer.iterations.numpy() == 3


class TestCellsRunAgain:
    @pytest.mark.parametrize("name", ["one", "mirrored3", "central2"])
    def test_strategy_model_and_variables_die_with_their_names(self, name):
        before = {id(thread) for thread in replica_threads()}
        alive = []
        for _ in range(20):
            strategy = strategy_named(name)
            with strategy.scope():
                model = small()
            model.fit(X, Y, **FIT)
            model.predict(X, verbose=0)
            parts = [strategy, model, model.optimizer, *model.variables, *model.optimizer.variables]
            alive += [weakref.ref(part) for part in parts]
            alive += [weakref.ref(component) for variable in model.variables for component in variable.components]
            del strategy, model, parts
        gc.collect()
        left = [reference() for reference in alive if reference() is not None]
        assert not left, f"{len(left)} of {len(alive)} are alive, such as {type(left[0]).__name__}"
        assert not [thread for thread in replica_threads() if id(thread) not in before]

    def test_the_same_names_bound_anew(self):
        """As a notebook does it: the old objects are dropped when the new ones are bound."""
        counts = []
        for _ in range(20):
            strategy = strategy_named("mirrored3")
            model = made(strategy, small)
            model.fit(X, Y, **FIT)
            gc.collect()
            counts.append(len(replica_threads()))
        close(state_of(model), reference(1))
        assert max(counts[5:]) <= counts[0]

    def test_models_come_and_go_under_one_strategy(self):
        strategy = strategy_named("mirrored3")
        alive, threads = [], []
        for _ in range(10):
            model = made(strategy, small)
            model.fit(X, Y, **FIT)
            alive += [weakref.ref(part) for part in (model, model.optimizer, *model.variables)]
            del model
            gc.collect()
            threads.append(len(replica_threads()))
        assert not [reference for reference in alive if reference() is not None]
        assert len(set(threads)) == 1
        model = made(strategy, small)
        model.fit(X, Y, **FIT)
        close(state_of(model), reference(1))

    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
    def test_after_a_failed_fit(self, error):
        def attempt():
            strategy = strategy_named("mirrored3")
            model = made(strategy, small)

            def fail(batch, logs):
                raise error

            with contextlib.suppress(error):
                model.fit(X, Y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=fail)], **FIT)
            return weakref.ref(strategy), weakref.ref(model)

        alive = [reference for _ in range(5) for reference in attempt()]
        gc.collect()
        assert not [reference for reference in alive if reference() is not None]

    def test_cleared_sessions(self):
        strategy = strategy_named("mirrored3")
        model = made(strategy, small)
        model.fit(X, Y, **FIT)
        keras.backend.clear_session()
        model.fit(X, Y, **FIT)
        close(state_of(model), reference(2))
        assert not kd.has_strategy()

    def test_an_exception_in_the_cell_that_makes_the_model(self):
        strategy = strategy_named("mirrored3")
        with pytest.raises(TypeError), strategy.scope():
            small().compile(no_such_argument=1)
        assert not kd.has_strategy()
        model = made(strategy, small)
        model.fit(X, Y, **FIT)
        close(state_of(model), reference(1))


class TestMemory:
    def test_flat_over_many_epochs(self):
        model = made(strategy_named("mirrored3"), small)
        x, y = X[:6], Y[:6]

        def measured():
            gc.collect()
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            return pages * resource.getpagesize() / 2**20, len(gc.get_objects())

        model.fit(x, y, epochs=20, **FIT)
        before = measured()
        history = model.fit(x, y, epochs=180, **FIT)
        del history
        after = measured()
        assert after[0] - before[0] < 4.0, "MiB in 180 epochs"
        assert after[1] - before[1] < 100, "objects in 180 epochs"

    def test_predict_and_evaluate_leave_nothing(self):
        model = made(strategy_named("mirrored3"), small)
        counts = []
        for _ in range(3):
            for _ in range(8):
                model.predict(X, verbose=0)
                model.evaluate(X, Y, verbose=0)
                model.train_on_batch(X, Y)
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert counts[2] - counts[1] < 50


class TestEventLoops:
    """Jupyter runs cells in a running event loop."""

    @pytest.mark.parametrize("name", ["mirrored3", "central2"])
    def test_fit_in_a_coroutine(self, name):
        async def cell():
            model = made(strategy_named(name), small)
            model.fit(X, Y, **FIT)
            await asyncio.sleep(0)
            model.fit(X, Y, **FIT)
            return state_of(model)

        close(asyncio.run(cell()), reference(2))
        assert not kd.has_strategy()

    def test_fit_in_a_thread_of_the_loop(self):
        strategy = strategy_named("mirrored3")
        model = made(strategy, small)
        ticks = []

        async def cell():
            async def ticking():
                while True:
                    ticks.append(1)
                    await asyncio.sleep(0.001)

            task = asyncio.create_task(ticking())
            await asyncio.to_thread(model.fit, X, Y, epochs=2, **FIT)
            task.cancel()

        asyncio.run(cell())
        close(state_of(model), reference(2))
        assert len(ticks) > 2

    def test_two_coroutines_each_in_a_scope_in_turns(self):
        """A scope is the thread's: leaving them in another order than entering is refused, and nothing stays."""

        async def cell(name):
            strategy = strategy_named(name)
            model = made(strategy, small)
            for _ in range(2):
                model.fit(X, Y, **FIT)
                await asyncio.sleep(0)
            return state_of(model)

        async def both():
            return await asyncio.gather(cell("mirrored2"), cell("mirrored3"))

        for state in asyncio.run(both()):
            close(state, reference(2))


def in_threads(*functions):
    """Calls functions at once, each in a thread, and returns what they returned or raises what they raised."""
    outcomes = [None] * len(functions)

    def work(index, function):
        try:
            outcomes[index] = (function(), None)
        except BaseException as error:  # noqa: BLE001 - raised below
            outcomes[index] = (None, error)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


class TestThreads:
    @pytest.mark.parametrize("name", ["one", "mirrored3", "central2"])
    def test_fit_in_another_thread_than_the_models(self, name):
        model = made(strategy_named(name), small)
        in_threads(lambda: model.fit(X, Y, **FIT))
        model.fit(X, Y, **FIT)
        in_threads(lambda: model.fit(X, Y, **FIT))
        close(state_of(model), reference(3))

    def test_all_of_it_in_another_thread(self):
        def work():
            model = made(strategy_named("mirrored3"), small)
            model.fit(X, Y, epochs=2, **FIT)
            assert not kd.has_strategy()
            return state_of(model)

        close(in_threads(work)[0], reference(2))

    @pytest.mark.parametrize("names", [("mirrored2", "mirrored3"), ("mirrored2", "none"), ("central2", "mirrored2")])
    def test_two_fits_of_two_strategies_at_once(self, names):
        models = [made(strategy_named(name), small) for name in names]
        in_threads(*(lambda model=model: model.fit(X, Y, epochs=8, **FIT) for model in models))
        expected = reference(8)
        for model in models:
            close(state_of(model), expected)

    def test_two_fits_of_one_strategy_at_once(self):
        strategy = strategy_named("mirrored3")
        models = [made(strategy, small) for _ in range(2)]
        in_threads(*(lambda model=model: model.fit(X, Y, epochs=8, **FIT) for model in models))
        expected = reference(8)
        for model in models:
            close(state_of(model), expected)

    def test_models_made_in_two_threads_at_once(self):
        def work(name):
            strategy = strategy_named(name)
            models = []
            for _ in range(5):
                with scope_of(strategy):
                    models.append(small())
            for model in models:
                assert model.distribute_strategy is strategy
                assert all(variable.strategy is strategy for variable in model.variables)
                model.fit(X, Y, **FIT)

        in_threads(lambda: work("mirrored2"), lambda: work("central2"))

    def test_a_scope_in_one_thread_is_not_anothers(self):
        strategy = strategy_named("mirrored2")
        with strategy.scope():
            assert in_threads(kd.has_strategy) == [False]
            (plain,) = in_threads(small)
        assert plain._distribute_strategy is None

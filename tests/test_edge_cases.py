"""Inputs and timings that nobody tuned the package to."""

import copy
import os
import signal
import textwrap
import threading
import time
import types

import keras
import numpy as np
import pytest
import torch
from keras import layers
from processes import output

import keras_distrib as kd
from keras_distrib.testing import assert_replicas_agree
from keras_distrib.values import PerReplica

X = np.random.default_rng(0).normal(size=(13, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def strategy_of(count, kind=kd.MirroredStrategy):
    return kind([f"cpu:{index}" for index in range(count)])


def replica_id():
    return kd.get_replica_context().replica_id_in_sync_group


def batch_of(strategy, tensor):
    return next(iter(strategy.experimental_distribute_dataset([tensor])))


class TestCreationForAllReplicas:
    def test_two_optimizers_have_slots_of_their_own(self, two):
        with two.scope():
            variables = [keras.Variable(torch.ones(2)) for _ in range(2)]
            optimizers = [keras.optimizers.SGD(0.1, momentum=0.9) for _ in variables]

        def step():
            for number, (optimizer, variable) in enumerate(zip(optimizers, variables, strict=True)):
                if replica_id() == number:
                    time.sleep(0.02)  # another replica is the last to come each time
                optimizer.apply([torch.full((2,), number + 1.0)], [variable])

        for _ in range(3):
            two.run(step)
        np.testing.assert_allclose([v.numpy()[0] for v in variables], [-0.1220, -1.2440], atol=1e-4)
        assert optimizers[0].variables[2] is not optimizers[1].variables[2]

    def test_each_merge_call_makes_a_variable(self, two):
        def step():
            context = kd.get_replica_context()
            return [context.merge_call(lambda strategy, k=k: keras.Variable(float(k))) for k in range(3)]

        assert [v.numpy().item() for v in two.run(step)] == [0.0, 1.0, 2.0]

    def test_a_build_that_says_it_is_built_before_it_ends(self, two):
        class Early(layers.Layer):
            def build(self, shape):
                super().build(shape)
                time.sleep(0.05)
                self.w = self.add_weight(shape=(2, 1), name="w")

            def call(self, x):
                return x @ self.w

        with two.scope():
            layer = Early()

        def step(x):
            if replica_id():
                time.sleep(0.02)
            return layer(x)

        assert two.gather(two.run(step, args=(batch_of(two, torch.ones(4, 2)),)), axis=0).shape == (4, 1)
        assert len(layer.weights) == 1

    @pytest.mark.parametrize("metric", [keras.metrics.F1Score, keras.metrics.R2Score])
    def test_metrics_that_build_in_their_first_update(self, metric):
        strategy = strategy_of(3)
        for _ in range(10):
            with strategy.scope():
                made = metric()
            strategy.run(lambda made=made: made.update_state(torch.ones(2, 1), torch.ones(2, 1)))
            assert len(made.variables) == len({id(v) for v in made.variables}) <= 5


class TestRandomness:
    @pytest.mark.parametrize("strategy", [kd.OneDeviceStrategy, kd.MirroredStrategy])
    def test_one_replica_draws_what_no_strategy_draws(self, strategy):
        made = strategy("cpu:0") if strategy is kd.OneDeviceStrategy else strategy(["cpu:0"])
        keras.utils.set_random_seed(0)
        drawn = made.run(lambda: keras.random.normal((3,)))
        keras.utils.set_random_seed(0)
        assert torch.equal(drawn, keras.random.normal((3,)))


class TestStateOfReplicasWithoutRows:
    @pytest.mark.parametrize("kind", [kd.MirroredStrategy, kd.experimental.CentralStorageStrategy])
    def test_a_counter_of_steps(self, kind):
        class Counting(layers.Layer):
            def build(self, shape):
                self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

            def call(self, x, training=False):
                if training:
                    self.steps.assign_add(1.0)
                return x

        with strategy_of(3, kind).scope():
            counting = Counting()
            model = keras.Sequential([counting, layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((7, 2)), np.ones((7, 1)), batch_size=6, epochs=2, verbose=0)
        assert counting.steps.numpy() == 4.0

    @pytest.mark.parametrize("kind", [kd.MirroredStrategy, kd.experimental.CentralStorageStrategy])
    def test_spectral_normalization(self, kind):
        def build():
            model = keras.Sequential(
                [layers.Input((3,)), layers.SpectralNormalization(layers.Dense(4)), layers.Dense(1)]
            )
            model.compile(keras.optimizers.SGD(0.05), "mse")
            return model

        assert_replicas_agree(build, (X, Y), [1, 3, 5], batch_size=6, strategy_fn=kind)


class TestTapes:
    def test_a_gradient_penalty(self, any_strategy):
        with any_strategy.scope():
            variable = keras.Variable(3.0)

        def step():
            x = torch.tensor(2.0)
            with kd.GradientTape() as outer:
                with kd.GradientTape() as inner:
                    inner.watch(x)
                    prediction = variable * variable * x
                gradient = inner.gradient(prediction, x)
                loss = variable * 1.0 + (gradient - 1) ** 2
            return outer.gradient(loss, variable)

        for gradient in any_strategy.experimental_local_results(any_strategy.run(step)):
            assert float(gradient) == 97.0


class TestSeveralBatches:
    @pytest.mark.parametrize("sizes", [(2, 6), (6, 2), (3, 3)])
    def test_no_row_of_either_is_lost(self, sizes):
        strategy = strategy_of(3)
        batches = tuple(batch_of(strategy, torch.ones(size, 1)) for size in sizes)
        sums = strategy.run(lambda a, b: (a.sum(), b.sum()), args=batches)
        assert tuple(float(strategy.reduce("SUM", own, None)) for own in sums) == sizes


class TestReductions:
    @pytest.mark.parametrize(
        ("value", "axis", "expected"),
        [
            (torch.full((4,), 200, dtype=torch.uint8), 0, 200.0),
            (torch.tensor(200, dtype=torch.uint8), None, 200.0),
            (torch.tensor(True), None, 1.0),
            (torch.full((4,), 6e4, dtype=torch.float16), 0, 6e4),
        ],
    )
    def test_means_do_not_wrap(self, two, value, axis, expected):
        assert float(two.reduce("MEAN", PerReplica([value] * 2), axis)) == pytest.approx(expected, rel=1e-3)

    def test_the_dtype_does_not_depend_on_the_number_of_replicas(self, mirrored):
        result = mirrored.run(lambda: kd.get_replica_context().all_reduce("MEAN", torch.tensor(3)))
        assert {v.dtype for v in mirrored.experimental_local_results(result)} == {torch.float64}
        count = mirrored.reduce("SUM", mirrored.experimental_distribute_values_from_function(lambda c: True), None)
        assert count.dtype == torch.int64

    def test_integer_means_are_refused_by_every_strategy(self, any_strategy):
        with any_strategy.scope(), pytest.raises(ValueError, match="aggregation=MEAN and a non-floating dtype"):
            keras.Variable(1, dtype="int32", aggregation="mean", trainable=False)

    def test_shapes_come_back_as_tuples(self, two):
        result = two.run(lambda x: x.shape, args=(batch_of(two, torch.ones(3, 2)),))
        assert result[0].values == (2, 1)
        assert result[1] == 2


class TestSteps:
    @pytest.mark.parametrize("method", ["train_step", "test_step"])
    def test_a_step_set_on_the_instance(self, two, method):
        with two.scope():
            model = keras.Sequential([layers.Dense(1)])
            model.compile("sgd", "mse")
        calls = []
        own = getattr(type(model), method)
        setattr(model, method, types.MethodType(lambda self, data: calls.append(1) or own(self, data), model))
        (model.fit if method == "train_step" else model.evaluate)(X, Y, batch_size=13, verbose=0)
        assert len(calls) == 2

    def test_a_metrics_result_under_another_name(self, mirrored):
        class Custom(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense, self.seen = layers.Dense(1), keras.metrics.Sum(name="n")

            def call(self, x):
                return self.dense(x)

            def test_step(self, data):
                self.seen.update_state(keras.ops.ones_like(data[1]))
                return {"total": self.seen.result()}

        with mirrored.scope():
            model = Custom()
            model.compile("sgd", "mse")
        assert model.evaluate(X, Y, batch_size=6, verbose=0, return_dict=True)["total"] == 13.0

    @pytest.mark.parametrize("least", [1.2, 100.0])
    def test_a_loss_of_a_selection_of_rows(self, least):
        class Selecting(keras.Sequential):
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
                chosen = (y[:, 0] > least) | (x[:, 0] == float(X[0, 0]))
                return keras.losses.MeanSquaredError()(y[chosen], y_pred[chosen])

        def build():
            model = Selecting([layers.Input((3,)), layers.Dense(1)])
            model.compile("sgd", "mse")
            return model

        trained = []
        for strategy in (kd.get_strategy(), strategy_of(3), strategy_of(5)):
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = build()
            loss = model.fit(X, Y, batch_size=13, shuffle=False, verbose=0).history["loss"]
            trained.append([np.array(loss), *model.get_weights()])
        for other in trained[1:]:
            for own, its in zip(trained[0], other, strict=True):
                np.testing.assert_allclose(its, own, rtol=1e-5, atol=1e-6)

    def test_a_step_may_write_into_its_batch(self, two):
        class Writing(keras.Sequential):
            def train_step(self, data):
                x, y = data
                x.sub_(0.5)
                return super().train_step((x, y))

        with two.scope():
            model = Writing([layers.Input((3,)), layers.Dense(4), layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=13, verbose=0)


class TestPredict:
    def test_no_rows(self, two):
        with two.scope():
            model = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
        assert model.predict_on_batch(X[:0]).shape == (0, 2)

    def test_an_output_that_is_no_batch(self):
        class WithWeight(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(2)

            def call(self, x):
                return {"y": self.dense(x), "w": self.dense.kernel.value * 1}

        with strategy_of(3).scope():
            model = WithWeight()
        out = model.predict(X[:12], batch_size=12, verbose=0)  # 4 rows each, and a weight of 3
        assert out["y"].shape == (12, 2)
        np.testing.assert_array_equal(out["w"], model.dense.kernel.numpy())


class TestCallbacks:
    def test_a_model_of_no_strategy_in_a_callback(self, two):
        teacher = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
        teacher.compile("sgd", "mse")
        with strategy_of(3).scope():
            other = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
            other.compile("sgd", "mse")

        class Teaching(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                teacher.fit(X, Y, verbose=0)
                other.fit(X, Y, verbose=0)
                assert self.model.evaluate(X, Y, verbose=0) > 0

        with two.scope():
            model = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[Teaching()])


class TestVariables:
    def test_a_copied_central_variable_is_one_tensor(self):
        strategy = strategy_of(2, kd.experimental.CentralStorageStrategy)
        with strategy.scope():
            variable = keras.Variable(1.0)
        other = copy.deepcopy(variable)
        other.assign(5.0)
        assert [float(v) for v in strategy.run(lambda: other.value.detach() * 1).values] == [5.0, 5.0]
        assert [float(v) for v in strategy.run(lambda: variable.value.detach() * 1).values] == [1.0, 1.0]

    @pytest.mark.parametrize("parts", [[1.0, 2.0], [np.ones((2, 3))] * 3])
    def test_per_replica_values_of_another_shape_or_number(self, two, parts):
        with two.scope():
            variable = keras.Variable(np.zeros((2, 3)), trainable=False)
        with pytest.raises(ValueError, match="one component of the variable's shape for each replica. Received"):
            variable.assign(PerReplica(parts))


class TestThreadsAndProcesses:
    def test_inference_mode_reaches_the_replicas(self, two):
        with torch.inference_mode():
            assert two.run(torch.is_inference_mode_enabled) is True

    def test_torchs_threads_after_runs_from_several_threads(self):
        before = torch.get_num_threads()
        for _ in range(5):
            seen = []

            def work(seen=seen):
                for _ in range(5):
                    strategy_of(2).run(lambda: time.sleep(0.001))
                seen.append(torch.get_num_threads())

            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=30)
            late = threading.Thread(target=lambda seen=seen: seen.append(torch.get_num_threads()))
            late.start()
            late.join(timeout=10)
            assert seen == [before] * 3

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
    def test_a_forked_process_makes_threads_of_its_own(self):
        code = """
            import os, torch, keras_distrib as kd
            strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            step = lambda: torch.tensor(kd.get_replica_context().replica_id_in_sync_group)
            strategy.run(step)
            child = os.fork()
            if child == 0:
                os._exit(0 if [int(v) for v in strategy.run(step).values] == [0, 1] else 1)
            assert os.waitpid(child, 0)[1] == 0
        """
        output("-W", "ignore", "-c", textwrap.dedent(code), timeout=60)

    def test_a_second_interrupt_does_not_wait_for_the_replicas(self):
        code = """
            import os, signal, threading, time, keras_distrib as kd
            strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            started = threading.Event()
            def interrupt():
                started.wait(30)
                for _ in range(2):
                    time.sleep(0.3)
                    os.kill(os.getpid(), signal.SIGINT)
            threading.Thread(target=interrupt, daemon=True).start()
            try:
                strategy.run(lambda: (started.set(), time.sleep(60)))
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                os._exit(0)
        """
        assert "interrupted" in output("-W", "ignore", "-c", textwrap.dedent(code), timeout=40)


def test_no_signal_handler_was_changed():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def compared(build, counts=(2, 3), y=Y, **options):
    """Trains on one device and on replicas; returns (history, weights) of each."""
    trained = []
    for count in (None, *counts):
        keras.utils.set_random_seed(1)
        with (kd.get_strategy() if count is None else strategy_of(count)).scope():
            model = build()
        history = model.fit(X, y, **{"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0, **options}).history
        trained.append((history, model.get_weights(), model))
    return trained


def assert_alike(trained):
    (history, weights, _), *others = trained
    for its, other, _ in others:
        assert list(its) == list(history)
        for own, found in zip(history.values(), its.values(), strict=True):
            np.testing.assert_allclose(found, own, rtol=2e-5, atol=1e-6)
        for own, found in zip(weights, other, strict=True):
            np.testing.assert_allclose(found, own, rtol=1e-5, atol=2e-6)


class TestAttributesThatStepsSet:
    class Remembering(keras.Model):
        calls = 0

        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = layers.Dense(200, "tanh"), layers.Dense(1)
            self.code = None

        def call(self, x):
            self.code = self.encoder(x)
            self.calls += 1
            return self.decoder(self.code)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight)
            return loss + keras.ops.mean(keras.ops.square(self.code))

    def test_they_are_each_replicas_own_and_the_first_ones_stay(self):
        def build():
            model = self.Remembering()
            model.compile("sgd", "mse")
            model(X[:2])
            model.calls = 0
            return model

        trained = compared(build, epochs=8)
        assert_alike(trained)
        for _, _, model in trained:
            assert model.calls == trained[0][2].calls >= 24
            assert model.code.shape[0] <= 3
        del trained[0][2].calls  # back to the class' value
        assert trained[0][2].calls == 0


class TestReturnedLogs:
    def test_nested_results_and_losses_by_name(self):
        class Custom(keras.Sequential):
            def train_step(self, data):
                x, y = data
                self.zero_grad()
                predicted = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=predicted)
                loss.backward()
                weights = self.trainable_weights
                with torch.no_grad():
                    self.optimizer.apply([w.value.grad for w in weights], weights)
                for metric in self.metrics:
                    if metric.name == "loss":
                        metric.update_state(loss)
                    else:
                        metric.update_state(y, predicted)
                return {metric.name: metric.result() for metric in self.metrics} | {"extra": x.mean()}

        def build():
            model = Custom([layers.Input((3,)), layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae"])
            return model

        assert_alike(compared(build))

    def test_a_returned_loss_is_not_the_unused_loss_metric(self):
        class Custom(keras.Sequential):
            def train_step(self, data):
                logs = super().train_step(data)
                return {"loss": 2 * logs["loss"].detach() * 0 + 7.0, "other": data[0].mean()}

        def build():
            model = Custom([layers.Input((3,)), layers.Dense(1)])
            model.compile("sgd", "mse")
            return model

        trained = compared(build, counts=(1, 3))
        assert_alike(trained)
        assert trained[1][0]["loss"] == [7.0, 7.0]


class TestLossesThatAreNoMeansOfRows:
    def test_add_loss_of_a_tensor_of_rows(self):
        class Adding(layers.Layer):
            def call(self, x):
                self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x), -1))
                return x

        def build():
            model = keras.Sequential([layers.Input((3,)), layers.Dense(4), Adding(), layers.Dense(1)])
            model.compile("sgd", "mse")
            return model

        assert_alike(compared(build))

    @pytest.mark.parametrize("name", ["Dice", "Tversky", "Circle"])
    def test_losses_that_compare_rows(self, name):
        classes = (np.arange(13) % 3).astype("int64")
        y = classes if name == "Circle" else np.eye(3, dtype="float32")[classes]

        def build():
            model = keras.Sequential([layers.Input((3,)), layers.Dense(3, "sigmoid"), layers.UnitNormalization()])
            model.compile(keras.optimizers.SGD(0.01), getattr(keras.losses, name)())
            return model

        assert_alike(compared(build, counts=(2, 3, 5), y=y))

    def test_losses_of_two_batches_of_different_sizes(self):
        loss = keras.losses.MeanSquaredError()
        data = [(torch.tensor(X[:7]), torch.tensor(Y[:7])), (torch.tensor(X[7:9]), torch.tensor(Y[7:9]))]
        expected = sum(float(loss(y, x.sum(1, keepdim=True) * 2)) for x, y in data)
        for count in (2, 3, 5):
            strategy = strategy_of(count)
            first, second = strategy.experimental_distribute_dataset(data)
            parts = strategy.run(
                lambda *batches: sum(loss(y, x.sum(1, keepdim=True) * 2) for x, y in batches), args=(first, second)
            )
            assert float(strategy.reduce("SUM", parts, None)) == pytest.approx(expected, rel=1e-5)


class TestWeightsThatDrift:
    @pytest.mark.parametrize("reduced", [False, True])
    def test_a_step_that_updates_weights_itself(self, two, reduced):
        class Own(keras.Sequential):
            def train_step(self, data):
                x, y = data
                self.zero_grad()
                keras.ops.mean(keras.ops.square(y - self(x))).backward()
                with torch.no_grad():
                    for weight in self.trainable_weights:
                        gradient = weight.value.grad
                        if reduced:
                            gradient = kd.get_replica_context().all_reduce("mean", gradient)
                        weight.assign_sub(0.05 * gradient)
                return {"one": 1.0}

        with two.scope():
            model = Own([layers.Input((3,)), layers.Dense(1)])
            model.compile("sgd", "mse")
        if reduced:
            model.fit(X, Y, batch_size=6, verbose=0)
        else:
            with pytest.raises(RuntimeError, match="different values to a trainable variable on different replicas"):
                model.fit(X, Y, batch_size=6, verbose=0)

    def test_saving_in_the_middle_of_accumulation_under_loss_scaling(self, tmp_path):
        ended = []
        for count in (None, 2, 3):
            strategy = kd.get_strategy() if count is None else strategy_of(count)
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
                inner = keras.optimizers.SGD(0.05, gradient_accumulation_steps=3)
                model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0), "mse")
            model.fit(X[:10], Y[:10], batch_size=5, shuffle=False, verbose=0)
            model.save(tmp_path / "model.keras")
            with strategy.scope():
                model = keras.models.load_model(tmp_path / "model.keras")
            model.fit(X[8:13], Y[8:13], batch_size=5, shuffle=False, verbose=0)
            ended.append(model.get_weights())
            for variable in model.trainable_variables if count else ():
                assert all(torch.equal(variable.components[0], other) for other in variable.components)
        for other in ended[1:]:
            for own, its in zip(ended[0], other, strict=True):
                np.testing.assert_allclose(its, own, rtol=1e-5, atol=1e-6)

    def test_a_torch_module_that_is_frozen_late(self, two):
        with two.scope():
            module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
            model = keras.Sequential([layers.Input((3,)), layers.TorchModuleWrapper(module, output_shape=(None, 1))])
            model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        for parameter in module[0].parameters():
            parameter.requires_grad_(False)
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            model.fit(X, Y, verbose=0)
        after = list(module.parameters())
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]

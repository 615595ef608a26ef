"""What N replicas owe to one device beyond the parity table's rows.

Golden values: tf.distribute 2.21 with its Keras 2, on logical CPUs.
"""

import sys

import keras
import numpy as np
import pytest
import torch
from keras import layers

import keras_distrib as kd
from keras_distrib.testing import assert_replicas_agree

RNG = np.random.default_rng(3)
X, R = RNG.normal(size=(20, 5)).astype("float32"), RNG.normal(size=(20, 2)).astype("float32")


def strategy_of(count):
    return kd.MirroredStrategy([f"cpu:{index}" for index in range(count)])


def replica_id():
    return kd.get_replica_context().replica_id_in_sync_group


def components(variable):
    return [component.detach().tolist() for component in variable.components]


class TestBatchNorm:
    """Golden values for momentum .5, rows [1, 2, 3] and [4, 5, 6]."""

    @staticmethod
    def trained(synchronized):
        strategy = strategy_of(2)
        with strategy.scope():
            norm = layers.BatchNormalization(momentum=0.5, synchronized=synchronized)
            norm.build((None, 1))
        rows = torch.arange(1.0, 7.0)[:, None]
        batch = next(iter(strategy.experimental_distribute_dataset([rows])))
        strategy.run(lambda x: norm(x, training=True), args=(batch,))
        return norm

    def test_each_replica_normalizes_its_own_rows(self):
        norm = self.trained(synchronized=False)
        np.testing.assert_allclose(components(norm.moving_mean), [[1.0], [2.5]])
        np.testing.assert_allclose(components(norm.moving_variance), [[0.8333], [0.8333]], rtol=1e-4)
        np.testing.assert_allclose(norm.moving_mean.numpy(), [1.75])
        np.testing.assert_allclose(norm.moving_variance.numpy(), [0.8333], rtol=1e-4)

    def test_synchronized(self):
        norm = self.trained(synchronized=True)
        for component in components(norm.moving_mean):
            np.testing.assert_allclose(component, [1.75])
        for component in components(norm.moving_variance):
            np.testing.assert_allclose(component, [1.9583], rtol=1e-4)

    def test_a_replica_without_rows_leaves_the_statistics_to_the_others(self):
        strategy = strategy_of(3)
        with strategy.scope():
            model = keras.Sequential([layers.Input((1,)), layers.BatchNormalization(momentum=0.5), layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.array([[1.0], [2.0], [3.0], [5.0]], "float32")
        model.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0)
        mean = model.layers[0].moving_mean
        own = components(mean)
        np.testing.assert_allclose(own[2], np.mean(own[:2], axis=0))
        np.testing.assert_allclose(mean.numpy(), np.mean(own[:2], axis=0))
        evaluated = model.evaluate(x, x, verbose=0)
        np.testing.assert_allclose(components(mean), [mean.numpy()] * 3)
        assert evaluated == model.evaluate(x, x, verbose=0)

    def test_synchronized_works_outside_of_a_strategy_as_ordinary(self):
        norm = layers.BatchNormalization(momentum=0.5, synchronized=True)
        norm(torch.arange(1.0, 7.0)[:, None], training=True)
        np.testing.assert_allclose(norm.moving_mean.numpy(), [1.75])
        assert layers.BatchNormalization.from_config(norm.get_config()).synchronized


class SelfAttention(layers.Layer):
    """Attention of a sequence to itself, with dropout."""

    def __init__(self):
        super().__init__()
        self.attend = layers.MultiHeadAttention(2, 2, dropout=0.2)

    def call(self, x, training=False):
        return self.attend(x, x, training=training)


class TestRandomness:
    @staticmethod
    def model():
        model = keras.Sequential(
            [
                layers.Input((5,)),
                layers.Dense(16, "relu"),
                layers.Dropout(0.5),
                layers.GaussianNoise(0.1, seed=4),
                layers.Reshape((4, 4)),
                SelfAttention(),
                layers.LSTM(4, dropout=0.3, recurrent_dropout=0.3),
                layers.Dropout(0.2, seed=1),
                layers.Dense(2),
            ]
        )
        model.compile("adam", "mse")
        return model

    def test_a_run_repeats_to_the_bit_at_any_switch_interval(self):
        runs = []
        interval = sys.getswitchinterval()
        try:
            for switch in (interval, 1e-6, 1e-6):
                sys.setswitchinterval(switch)
                keras.utils.set_random_seed(11)
                with strategy_of(3).scope():
                    model = self.model()
                model.fit(X, R, batch_size=7, epochs=2, verbose=0)
                runs.append(model.get_weights())
        finally:
            sys.setswitchinterval(interval)
        for other in runs[1:]:
            for own, its in zip(runs[0], other, strict=True):
                np.testing.assert_array_equal(own, its)

    @pytest.mark.parametrize("seed", [None, 5])
    def test_masks_differ_by_replica_and_step(self, seed):
        strategy = strategy_of(3)
        with strategy.scope():
            dropout = layers.Dropout(0.5, seed=seed)
        masks = [strategy.run(lambda: dropout(torch.ones(64), training=True)) for _ in range(3)]
        drawn = {tuple(mask.tolist()) for step in masks for mask in step.values}
        assert len(drawn) == 9
        assert {value for mask in drawn for value in mask} == {0.0, 2.0}

    def test_recurrent_masks_are_each_replicas_own(self):
        """Uneven rows: a mask of another replica would have another shape."""
        strategy = strategy_of(2)
        with strategy.scope():
            cell = layers.LSTM(8, dropout=0.5, recurrent_dropout=0.5, return_sequences=True, seed=1)
            cell.build((None, 6, 4))
        batch = next(iter(strategy.experimental_distribute_dataset([torch.ones(5, 6, 4)])))
        for _ in range(10):
            out = strategy.run(lambda x: cell(x, training=True), args=(batch,))
            first, second = (value[0] for value in out.values)
            assert not torch.allclose(first, second)

    def test_torchs_global_generator_in_a_step_is_warned_of(self):
        strategy = strategy_of(2)
        with pytest.warns(UserWarning, match="drew random numbers from torch's global generator"):
            strategy.run(lambda: torch.rand(2))
        strategy.run(lambda: torch.rand(2))  # said once


class TestOptimizers:
    def test_an_inf_on_one_replica_makes_all_skip(self):
        strategy = strategy_of(3)
        with strategy.scope():
            variable = keras.Variable(1.0)
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)

        def step(bad):
            gradient = torch.tensor(float("inf")) if bad and replica_id() == 1 else torch.tensor(8.0)
            optimizer.apply([gradient], [variable])

        strategy.run(step, args=(True,))
        assert components(variable) == [1.0] * 3
        assert components(optimizer.dynamic_scale) == [4.0] * 3
        strategy.run(step, args=(False,))
        assert components(variable) == [-5.0] * 3  # 1 - 3 * 8 / 4
        assert int(optimizer.iterations) == 1

    @pytest.mark.parametrize(
        ("clipping", "w", "b"),
        [({"clipnorm": 1.0}, 1.1, 0.1), ({"clipvalue": 1.0}, 1.1, 0.1), ({"global_clipnorm": 1.0}, 1.0972, 0.0234)],
    )
    def test_golden_clipping(self, replicas, clipping, w, b):
        """The summed gradient is clipped, as on one device and in Keras 2; Keras 3 clips each replica's."""
        x = np.arange(1, 7, dtype="float32")[:, None]
        with strategy_of(replicas).scope():
            model = keras.Sequential([layers.Input((1,)), layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.1, **clipping), "mse")
        model.fit(x, 2 * x + 1, batch_size=6, shuffle=False, verbose=0)
        np.testing.assert_allclose([v.item() for v in model.get_weights()], [w, b], atol=5e-5)

    def test_gradients_accumulate_on_each_replica_until_the_update(self):
        strategy = strategy_of(2)
        with strategy.scope():
            variable = keras.Variable(1.0)
            optimizer = keras.optimizers.SGD(1.0, momentum=0.5, gradient_accumulation_steps=2)
        gradients = iter([(1.0, 2.0), (3.0, 5.0), (1.0, 1.0)])

        def apply():
            own = next(gradients)
            strategy.run(lambda: optimizer.apply([torch.tensor(own[replica_id()])], [variable]))

        apply()
        (accumulator,) = optimizer._accumulated_gradients
        assert components(accumulator) == [1.0, 2.0]
        assert float(accumulator.value) == 3.0
        assert components(variable) == [1.0, 1.0]
        assert components(optimizer.momentums[0]) == [0.0, 0.0]
        apply()
        assert components(variable) == [-4.5, -4.5]  # 1 - (3 + 8) / 2
        assert components(accumulator) == [0.0, 0.0]
        assert components(optimizer.momentums[0]) == [-5.5, -5.5]
        apply()
        assert components(accumulator) == [1.0, 1.0]
        accumulator.assign(7.0)
        assert float(accumulator.value) == 7.0

    def test_accumulation_meets_once_per_update(self, monkeypatch):
        from keras_distrib.replicas.meeting import Meeting

        names = []
        original = Meeting.meet
        monkeypatch.setattr(
            Meeting, "meet", lambda self, index, name, *rest: names.append(name) or original(self, index, name, *rest)
        )
        with strategy_of(2).scope():
            model = keras.Sequential([layers.Input((5,)), layers.Dense(2)])
            model.compile(keras.optimizers.Adam(gradient_accumulation_steps=4), "mse")
        model.fit(X, R, batch_size=5, epochs=2, verbose=0)
        applied = [name for name in names if name.endswith(".apply")]
        assert len(applied) == 2 * 2  # two updates in eight steps, on two replicas

    def test_accumulation_with_replicas_without_rows(self):
        def build():
            model = keras.Sequential([layers.Input((5,)), layers.Dense(2)])
            model.compile(keras.optimizers.Adam(0.05, gradient_accumulation_steps=3), "mse")
            return model

        assert_replicas_agree(build, (X[:17], R[:17]), [3, 5], batch_size=4, epochs=3)

    def test_gradients_that_are_reduced_already(self):
        """Golden values: gradients 1 and 2, rate .1, on 0: -.1 and -.2 where they are not summed."""
        strategy = strategy_of(2)
        with strategy.scope():
            variable, optimizer = keras.Variable(0.0), keras.optimizers.SGD(0.1)

        def step():
            with kd.skip_gradients_aggregation():
                optimizer.apply([torch.tensor(1.0 + replica_id())], [variable])

        strategy.run(step)
        np.testing.assert_allclose(components(variable), [-0.1, -0.2])
        central = kd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
        with central.scope():
            variable, optimizer = keras.Variable(0.0), keras.optimizers.SGD(0.1)
        with pytest.raises(ValueError, match="`skip_gradients_aggregation` needs variables of each replica's own"):
            central.run(step)

    def test_variables_that_their_gradient_overwrites_are_not_summed(self):
        strategy = strategy_of(2)
        with strategy.scope():
            scale, weight = keras.Variable(1.0), keras.Variable(1.0)
            scale.overwrite_with_gradient = True
            optimizer = keras.optimizers.SGD(1.0)
        strategy.run(lambda: optimizer.apply([torch.tensor(3.0), torch.tensor(1.0)], [scale, weight]))
        assert components(scale) == [3.0, 3.0]
        assert components(weight) == [-1.0, -1.0]


class TestCustomLoop:
    """A loop of one's own, on one device and on replicas."""

    @pytest.mark.parametrize("loss_reduction", ["none", "sum_over_batch_size"])
    def test_weights_losses_and_metrics(self, replicas, loss_reduction):
        labels = RNG.integers(0, 2, size=(20, 1)).astype("float32")
        batches = [(torch.tensor(X[i : i + 6]), torch.tensor(labels[i : i + 6])) for i in range(0, 20, 6)]
        ended = []
        for strategy in (kd.get_strategy(), strategy_of(replicas)):
            keras.utils.set_random_seed(2)
            with strategy.scope():
                model = keras.Sequential([layers.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(1)])
                optimizer = keras.optimizers.Adam(0.05)
                metrics = [keras.metrics.BinaryAccuracy(threshold=0.0), keras.metrics.AUC(from_logits=True)]
            loss_object = keras.losses.BinaryCrossentropy(from_logits=True, reduction=loss_reduction)

            def step(inputs, model=model, optimizer=optimizer, metrics=metrics, loss_object=loss_object):
                x, y = inputs
                rows = kd.get_replica_context().global_rows or len(x)
                with kd.GradientTape() as tape:
                    predicted = model(x, training=True)
                    loss = loss_object(y, predicted)
                    if loss_reduction == "none":
                        loss = kd.compute_average_loss(loss, global_batch_size=rows)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
                for metric in metrics:
                    metric.update_state(y, predicted.detach())
                return loss.detach()

            logged = []
            for _ in range(3):
                for batch in strategy.experimental_distribute_dataset(batches):
                    logged.append(float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)))
            ended.append([np.array(logged), *model.get_weights(), *(float(metric.result()) for metric in metrics)])
        for own, its in zip(*ended, strict=True):
            np.testing.assert_allclose(its, own, rtol=1e-5, atol=1e-6)


class TestTorchModules:
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(5, momentum=0.5)
            self.linear = torch.nn.Linear(5, 2)

        def call(self, x):
            return self.linear(self.norm(x))

    def test_buffers_are_merged(self):
        strategy = strategy_of(2)
        with strategy.scope():
            model = self.Model()
            model.compile("sgd", "mse")
        model(X[:2])  # builds it; batch norm updates its statistics here too
        norm = model.norm.module
        norm.reset_running_stats()
        batch = next(iter(strategy.experimental_distribute_dataset([torch.tensor(X[:7])])))
        strategy.run(lambda x: model(x, training=True), args=(batch,))
        parts = [torch.tensor(X[:4]), torch.tensor(X[4:7])]
        expected = sum(0.5 * part.mean(0) for part in parts) / 2
        torch.testing.assert_close(norm.running_mean, expected)
        assert int(norm.num_batches_tracked) == 1
        strategy.run(lambda x: model(x, training=True), args=(batch,))
        assert int(norm.num_batches_tracked) == 2

    def test_gradients_reach_every_replicas_own_parameters(self, any_strategy):
        with any_strategy.scope():
            model = self.Model()
        model(X[:2])

        def step():
            loss = model(torch.tensor(X[: 4 + replica_id()]), training=True).square().sum()
            return torch.autograd.grad(loss, [v.value for v in model.trainable_variables])

        for gradient in any_strategy.run(step):
            for value in any_strategy.experimental_local_results(gradient):
                assert float(value.abs().sum()) > 0

    def test_training_fits(self):
        with strategy_of(2).scope():
            model = self.Model()
            model.compile(keras.optimizers.Adam(0.05), "mse")
        model(X[:2])
        history = model.fit(X, R, batch_size=5, epochs=10, verbose=0).history["loss"]
        assert history[-1] < history[0]
        torch.testing.assert_close(
            model.linear.module.weight, model.linear.trainable_variables[0].value, rtol=0, atol=0
        )


class TestStatefulRecurrence:
    X, Y = RNG.normal(size=(20, 3, 4)).astype("float32"), RNG.normal(size=(20, 2)).astype("float32")

    @staticmethod
    def build(layer=layers.SimpleRNN):
        model = keras.Sequential([layers.Input(batch_shape=(5, 3, 4)), layer(3, stateful=True), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    @pytest.mark.parametrize("strategy_class", [kd.MirroredStrategy, kd.experimental.CentralStorageStrategy])
    def test_training_equals_one_device(self, strategy_class, replicas):
        trained = []
        for strategy in (kd.get_strategy(), strategy_class([f"cpu:{index}" for index in range(replicas)])):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                model = self.build()
            model.fit(self.X, self.Y, batch_size=5, epochs=3, shuffle=False, verbose=0)
            trained.append([*model.get_weights(), model.layers[0].states[0].numpy()])
        for own, its in zip(*trained, strict=True):
            np.testing.assert_allclose(its, own, atol=1e-6)

    @pytest.mark.parametrize("layer", [layers.GRU, layers.LSTM])
    def test_prediction_equals_one_device_and_training_works(self, layer):
        """Keras 3.15 cannot train these on torch on one device: it writes a state that it still needs."""
        keras.utils.set_random_seed(0)
        model = self.build(layer)
        keras.utils.set_random_seed(0)
        with strategy_of(3).scope():
            other = self.build(layer)
        for _ in range(2):  # the second goes on from the first one's state
            own = model.predict(self.X, batch_size=5, verbose=0)
            np.testing.assert_allclose(other.predict(self.X, batch_size=5, verbose=0), own, atol=1e-6)
        for mine, its in zip(model.layers[0].states, other.layers[0].states, strict=True):
            np.testing.assert_allclose(its.numpy(), mine.numpy(), atol=1e-6)
        losses = other.fit(self.X, self.Y, batch_size=5, epochs=5, shuffle=False, verbose=0).history["loss"]
        assert losses[-1] < losses[0]
        other.layers[0].reset_state()
        assert not other.layers[0].states[0].numpy().any()

    def test_another_batch_size_is_refused(self):
        with strategy_of(2).scope():
            model = self.build()
        with pytest.raises(ValueError, match=r"If an RNN is stateful, the batch size.*Received: global batch size=3"):
            model.predict(RNG.normal(size=(3, 3, 4)), batch_size=3, verbose=0)


def test_the_check_says_which_layer_differs():
    class Uneven(layers.Layer):
        """Computes something else on each replica."""

        def call(self, x):
            context = kd.get_replica_context()
            return x * (1.0 + (0 if context is None else context.replica_id_in_sync_group))

    def build():
        model = keras.Sequential([layers.Input((5,)), Uneven(), layers.Dense(2, name="odd")])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(AssertionError, match=r"2 replicas against one device:\n.*gradients.*odd/kernel"):
        assert_replicas_agree(build, (X, R), [2])

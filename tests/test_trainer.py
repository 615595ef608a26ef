"""`fit`, `evaluate`, `predict` and the `_on_batch` methods under every strategy."""

import keras
import numpy as np
import pytest
import torch

import keras_distrib as kd

ROWS = 23
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 6)).astype("float32")
Y = RNG.integers(0, 3, size=(ROWS,))


def compiled(model, **options):
    options = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"], **options}
    model.compile(optimizer=keras.optimizers.Adam(0.05), **options)
    return model


def sequential():
    return compiled(keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]))


def unbuilt():
    return compiled(keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]))


def functional():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    return compiled(keras.Model(inputs, keras.layers.Dense(3)(keras.layers.add([hidden, hidden]))))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, "relu")
        self.out = keras.layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))


def subclassed():
    return compiled(Subclassed())


BUILDERS = [sequential, unbuilt, functional, subclassed]


def made(strategy, build, seed=1):
    keras.utils.set_random_seed(seed)
    if strategy is None:
        return build()
    with strategy.scope():
        return build()


def assert_weights_close(model, other, atol=2e-6):
    for own, its in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(its, own, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("build", BUILDERS)
def test_all_methods_equal_one_device(any_strategy, build):
    model, other = made(None, build), made(any_strategy, build)
    options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (X[:7], Y[:7])}
    own, its = model.fit(X, Y, **options), other.fit(X, Y, **options)
    assert set(own.history) == set(its.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for name, values in own.history.items():
        np.testing.assert_allclose(its.history[name], values, rtol=1e-5, err_msg=name)
    assert_weights_close(model, other)
    np.testing.assert_allclose(
        other.evaluate(X, Y, batch_size=4, verbose=0), model.evaluate(X, Y, batch_size=4, verbose=0), rtol=1e-5
    )
    predicted = other.predict(X, batch_size=4, verbose=0)
    assert predicted.shape == (ROWS, 3)
    np.testing.assert_allclose(predicted, model.predict(X, batch_size=4, verbose=0), atol=1e-5)
    for _ in range(2):
        np.testing.assert_allclose(other.train_on_batch(X, Y), model.train_on_batch(X, Y), rtol=1e-5)
    np.testing.assert_allclose(other.test_on_batch(X[:3], Y[:3]), model.test_on_batch(X[:3], Y[:3]), rtol=1e-5)
    np.testing.assert_allclose(other.predict_on_batch(X[:3]), model.predict_on_batch(X[:3]), atol=1e-5)
    assert isinstance(other.train_on_batch(X, Y, return_dict=True), dict)


def test_several_inputs_and_outputs_as_dicts(mirrored):
    def build():
        a, b = keras.Input((6,), name="a"), keras.Input((2, 2), name="b")
        joined = keras.layers.concatenate([a, keras.layers.Flatten()(b)])
        outputs = {"c": keras.layers.Dense(3, name="c")(joined), "r": keras.layers.Dense(1, name="r")(joined)}
        model = keras.Model({"a": a, "b": b}, outputs)
        model.compile(
            keras.optimizers.SGD(0.05),
            loss={"c": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "r": "mse"},
            loss_weights={"c": 1.0, "r": 0.5},
            metrics={"c": "accuracy", "r": "mae"},
        )
        return model

    x = {"a": X, "b": RNG.normal(size=(ROWS, 2, 2)).astype("float32")}
    y = {"c": Y, "r": X[:, :1]}
    model, other = made(None, build), made(mirrored, build)
    options = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
    own, its = model.fit(x, y, **options).history, other.fit(x, y, **options).history
    assert set(own) == set(its)
    for name, values in own.items():
        np.testing.assert_allclose(its[name], values, rtol=1e-5, err_msg=name)
    assert_weights_close(model, other)
    own, its = model.predict(x, batch_size=6, verbose=0), other.predict(x, batch_size=6, verbose=0)
    assert set(its) == {"c", "r"}
    np.testing.assert_allclose(its["r"], own["r"], atol=1e-5)


def test_sample_weight_and_class_weight(mirrored):
    weights = RNG.uniform(0, 2, size=(ROWS,)).astype("float32")
    for options in ({"sample_weight": weights}, {"class_weight": {0: 1.0, 1: 5.0, 2: 0.5}}):
        model, other = made(None, sequential), made(mirrored, sequential)
        options |= {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
        own, its = model.fit(X, Y, **options).history, other.fit(X, Y, **options).history
        np.testing.assert_allclose(its["loss"], own["loss"], rtol=1e-5)
        assert_weights_close(model, other)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(index * 6, (index + 1) * 6)
        return X[rows], Y[rows]


def generator():
    while True:
        for index in range(4):
            rows = slice(index * 6, (index + 1) * 6)
            yield X[rows], Y[rows]


def loader():
    dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(dataset, batch_size=6)


@pytest.mark.parametrize("source", [Batches, generator, loader, lambda: (torch.tensor(X), torch.tensor(Y))])
def test_sources(two, source):
    options = {"epochs": 2, "verbose": 0, "shuffle": False}
    if source is generator:
        options["steps_per_epoch"] = 4

    def arguments():
        data = source()
        return {"x": data[0], "y": data[1], "batch_size": 6} if isinstance(data, tuple) else {"x": data}

    model, other = made(None, sequential), made(two, sequential)
    own = model.fit(**arguments(), **options).history
    its = other.fit(**arguments(), **options).history
    np.testing.assert_allclose(its["loss"], own["loss"], rtol=1e-5)
    assert_weights_close(model, other)
    if source in (Batches, loader):
        data = source()
        np.testing.assert_allclose(other.evaluate(data, verbose=0), model.evaluate(data, verbose=0), rtol=1e-5)
        np.testing.assert_allclose(other.predict(data, verbose=0), model.predict(data, verbose=0), atol=1e-5)


def test_predict_gives_every_row_once_in_order(mirrored):
    model = made(mirrored, lambda: keras.Sequential([keras.layers.Input((1,)), keras.layers.Rescaling(2.0)]))
    for rows in (1, 2, 9, 97):
        x = np.arange(rows, dtype="float32")[:, None]
        np.testing.assert_array_equal(model.predict(x, batch_size=8, verbose=0), 2 * x)


def test_callbacks_act_once_with_global_logs(two):
    class Counting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.events = []

        def on_train_batch_end(self, batch, logs=None):
            self.events.append(("batch", batch, sorted(logs)))

        def on_epoch_end(self, epoch, logs=None):
            self.events.append(("epoch", epoch, float(logs["loss"])))
            self.model.optimizer.learning_rate = 0.01

    counting = Counting()
    model = made(two, sequential)
    history = model.fit(X, Y, batch_size=12, epochs=2, verbose=0, callbacks=[counting])
    assert [event[:2] for event in counting.events] == [
        ("batch", 0),
        ("batch", 1),
        ("epoch", 0),
        ("batch", 0),
        ("batch", 1),
        ("epoch", 1),
    ]
    assert counting.events[0][2] == ["accuracy", "loss"]
    assert [event[2] for event in counting.events if event[0] == "epoch"] == history.history["loss"]
    rate = model.optimizer._learning_rate
    assert [float(component) for component in rate.components] == pytest.approx([0.01, 0.01])


def test_fit_says_once_what_it_runs_on(two, capsys):
    model = made(two, sequential)
    model.fit(X, Y, batch_size=9, epochs=2, verbose=2)
    out = capsys.readouterr().out
    assert out.count("MirroredStrategy: 2 replicas (cpu:0, cpu:1), global batch 9, per replica 5") == 1
    assert out.count("Epoch 2/2") == 1
    model.fit(Batches(), epochs=1, shuffle=False, verbose=2)
    out = capsys.readouterr().out
    assert out.count("MirroredStrategy: 2 replicas (cpu:0, cpu:1), global batch 6, per replica 3") == 1
    model.fit(X, Y, verbose=0)
    model.evaluate(X, Y, verbose=2)
    assert "replicas" not in capsys.readouterr().out


def test_training_goes_on_where_it_stood(two):
    model, other = made(None, sequential), made(two, sequential)
    for _ in range(2):
        for one in (model, other):
            one.fit(X, Y, batch_size=7, epochs=1, shuffle=False, verbose=0)
    assert_weights_close(model, other)


def test_an_error_in_a_step_leaves_the_model_usable(two):
    class Fragile(keras.layers.Layer):
        broken = False

        def call(self, x):
            if self.broken and kd.get_replica_context() is not None:
                raise ZeroDivisionError("in call")
            return x

    def build():
        model = keras.Sequential([keras.layers.Input((6,)), Fragile(), keras.layers.Dense(3)])
        return compiled(model)

    model = made(two, build)
    model.layers[0].broken = True
    with pytest.raises(ZeroDivisionError, match="in call") as caught:
        model.fit(X, Y, verbose=0)
    assert "Raised in replica 0 of 2 (cpu:0)." in "".join(caught.value.__notes__)
    model.layers[0].broken = False
    model.fit(X, Y, verbose=0)


def test_unequal_rows_are_refused(two):
    model = made(two, sequential)
    with pytest.raises(ValueError, match=r"same number of rows \(axis 0\). Received: shapes=\[\(5, 6\), \(4,\)\]"):
        model.train_on_batch(X[:5], Y[:4])


def test_steps_per_execution(two):
    def build():
        model = sequential()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=2)
        return model

    model, other = made(None, sequential), made(two, build)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for one in (model, other):
        one.fit(X[:20], Y[:20], batch_size=5, epochs=2, shuffle=False, verbose=0)
    assert_weights_close(model, other)
    np.testing.assert_allclose(
        other.predict(X[:20], batch_size=5, verbose=0), model.predict(X[:20], batch_size=5, verbose=0), atol=1e-5
    )


@pytest.mark.parametrize("method", ["train_step", "test_step"])
def test_users_steps(two, method):
    """Keras' documented torch form; a returned metric is global, another scalar the mean over rows."""

    class Custom(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.tracker = keras.metrics.Mean(name="seen")
            self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def call(self, x):
            return self.dense(x)

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.loss_fn(y, self(x, training=True))
            loss.backward()
            weights = list(self.trainable_weights)
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in weights], weights)
            self.tracker.update_state(y)
            return {"seen": self.tracker.result(), "mean_y": y.float().mean()}

        def test_step(self, data):
            x, y = data
            self.tracker.update_state(y)
            return {"seen": self.tracker.result(), "mean_y": y.float().mean()}

    def build():
        model = Custom()
        model.compile("sgd")
        return model

    model, other = made(None, build), made(two, build)
    if method == "train_step":
        own = model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        its = other.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        assert_weights_close(model, other)
    else:
        own = model.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True)
        its = other.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True)
    assert set(own) == set(its) == {"seen", "mean_y"}
    for name, value in own.items():
        np.testing.assert_allclose(its[name], value, rtol=1e-5, err_msg=name)


class TestOwnership:
    def test_model_from_outside(self, two):
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3)])
        with two.scope(), pytest.raises(ValueError, match="was not created in the distribution strategy scope of"):
            model.compile("sgd", "mse")
        model.compile("sgd", "mse")
        with two.scope(), pytest.raises(ValueError, match="but `fit` was called in it"):
            model.fit(X, Y, verbose=0)

    def test_layer_from_outside(self, two):
        layer = keras.layers.Dense(3, name="stranger")
        layer.build((None, 6))
        with two.scope():
            model = keras.Sequential([keras.layers.Input((6,)), layer])
            with pytest.raises(ValueError, match=r"Variable \(stranger/kernel\) was not created .* no strategy"):
                model.compile("sgd", "mse")

    def test_optimizer_and_metric_from_outside(self, two):
        optimizer, metric = keras.optimizers.SGD(), keras.metrics.MeanSquaredError(name="strange")
        with two.scope():
            model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3)])
            with pytest.raises(ValueError, match="All optimizers must be created in.*Move the optimizer's creation"):
                model.compile(optimizer, "mse")
            with pytest.raises(ValueError, match="All metrics must be created in.*Received: metric 'strange'"):
                model.compile("sgd", "mse", metrics=[metric])

    def test_another_strategys_parts(self, two):
        other = kd.MirroredStrategy(["cpu:2", "cpu:3"])
        with other.scope():
            optimizer = keras.optimizers.SGD()
        model = made(two, sequential)
        with pytest.raises(ValueError, match=r"<MirroredStrategy on cpu:2, cpu:3.*<MirroredStrategy on cpu:0, cpu:1"):
            model.compile(optimizer, "mse")
        with other.scope(), pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
            model.fit(X, Y, verbose=0)

    def test_built_in_scope_compiled_and_fitted_outside(self, two):
        with two.scope():
            model = keras.Sequential([keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        model.fit(X, Y, verbose=0)
        for variable in (*model.variables, *model.optimizer.variables, *model.metrics_variables):
            assert variable.strategy is two
        assert model.distribute_strategy is two

    def test_plain_models_are_of_no_strategy(self):
        model = sequential()
        assert model.distribute_strategy is kd.get_strategy()
        model.fit(X, Y, verbose=0)


def test_fit_twice_and_two_strategies_after_one_another():
    for count in (2, 3):
        strategy = kd.MirroredStrategy([f"cpu:{i}" for i in range(count)])
        model = made(strategy, sequential)
        model.fit(X, Y, verbose=0)
        model.fit(X, Y, verbose=0)


class TestStepsWrittenAsForOneDevice:
    """In `fit` a user's step sees its own rows; what it computes is averaged by the shares."""

    @staticmethod
    def both(strategy, build):
        model, other = made(None, build), made(strategy, build)
        options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
        return model, other, model.fit(X, Y, **options).history, other.fit(X, Y, **options).history

    def test_a_loss_of_plain_torch_operations(self, mirrored):
        class Custom(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(3)
                self.mean = keras.metrics.Mean(name="loss")

            def call(self, x):
                return self.dense(x)

            @property
            def metrics(self):
                return [self.mean]

            def train_step(self, data):
                x, y = data
                self.zero_grad()
                loss = torch.nn.functional.cross_entropy(self(x, training=True), y)
                loss.backward()
                weights = list(self.trainable_weights)
                with torch.no_grad():
                    self.optimizer.apply([v.value.grad for v in weights], weights)
                self.mean.update_state(loss)
                return {"loss": self.mean.result()}

        def build():
            model = Custom()
            model.compile(keras.optimizers.Adam(0.05))
            return model

        model, other, own, its = self.both(mirrored, build)
        assert_weights_close(model, other)
        np.testing.assert_allclose(its["loss"], own["loss"], rtol=1e-5)

    def test_a_compute_loss_of_ones_own(self, mirrored):
        class Custom(keras.Sequential):
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
                loss = super().compute_loss(x, y, y_pred, sample_weight, training)
                return loss + 0.1 * y_pred.square().mean()

        def build():
            return compiled(Custom([keras.layers.Input((6,)), keras.layers.Dense(3, kernel_regularizer="l2")]))

        model, other, own, its = self.both(mirrored, build)
        assert_weights_close(model, other)
        np.testing.assert_allclose(its["loss"], own["loss"], rtol=1e-5)

    def test_a_compute_metrics_of_ones_own(self, mirrored):
        class Custom(keras.Sequential):
            def compute_metrics(self, x, y, y_pred, sample_weight=None):
                logs = super().compute_metrics(x, y, y_pred, sample_weight)
                logs["largest"] = y_pred.mean()
                return logs

        def build():
            return compiled(Custom([keras.layers.Input((6,)), keras.layers.Dense(3)]))

        model, other, own, its = self.both(mirrored, build)
        assert set(its) == {"loss", "accuracy", "largest"}
        for name, values in own.items():
            np.testing.assert_allclose(its[name], values, rtol=1e-5, err_msg=name)
        assert_weights_close(model, other)

    def test_super_train_step(self, mirrored):
        class Custom(keras.Sequential):
            def train_step(self, data):
                x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
                logs = super().train_step((2 * x, y, sample_weight))
                return {**logs, "rows": y.float().mean()}

        def build():
            return compiled(Custom([keras.layers.Input((6,)), keras.layers.Dense(3)]))

        model, other, own, its = self.both(mirrored, build)
        for name, values in own.items():
            np.testing.assert_allclose(its[name], values, rtol=1e-5, err_msg=name)
        assert_weights_close(model, other)


class Gan(keras.Model):
    """Two networks and two optimizers in one step, as Keras documents it."""

    def __init__(self):
        super().__init__()
        dense = keras.layers.Dense
        self.generator = keras.Sequential([keras.layers.Input((4,)), dense(8, "relu"), dense(6)])
        self.discriminator = keras.Sequential([keras.layers.Input((6,)), dense(8, "relu"), dense(1)])
        self.losses_by_name = {name: keras.metrics.Mean(name=name) for name in ("d_loss", "g_loss")}
        self.built = True

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return list(self.losses_by_name.values())

    def update(self, network, optimizer, name, loss):
        network.zero_grad()
        loss.backward()
        weights = network.trainable_weights
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in weights], weights)
        self.losses_by_name[name].update_state(loss)

    def train_step(self, data):
        (real, latent), _ = data
        rows = len(real)
        both = torch.cat([self.generator(latent).detach(), real])
        labels = torch.cat([torch.ones(rows, 1), torch.zeros(rows, 1)])
        self.update(self.discriminator, self.d_optimizer, "d_loss", self.loss_fn(labels, self.discriminator(both)))
        fooled = self.discriminator(self.generator(latent))
        self.update(self.generator, self.g_optimizer, "g_loss", self.loss_fn(torch.zeros(rows, 1), fooled))
        return {metric.name: metric.result() for metric in self.metrics}


def test_a_gan(any_strategy):
    """The discriminator's loss has two values per row; its mean is over all of them."""
    latent = RNG.normal(size=(ROWS, 4)).astype("float32")

    def build():
        model = Gan()
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
        return model

    model, other = made(None, build), made(any_strategy, build)
    options = {"batch_size": 6, "epochs": 3, "shuffle": False, "verbose": 0}
    own, its = (m.fit((X, latent), np.zeros(ROWS), **options).history for m in (model, other))
    assert set(its) == {"d_loss", "g_loss"}
    for name, values in own.items():
        np.testing.assert_allclose(its[name], values, rtol=1e-5)
    assert_weights_close(model, other)

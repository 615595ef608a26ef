"""Keras' callbacks on three replicas decide, log and write what they do on one device."""

import _thread
import contextlib
import csv
import json
import signal
import threading

import keras
import numpy as np
import pytest
from keras import callbacks, layers
from strategies import close, made, replicas_agree, scope_of, state_of, strategy_named

import keras_distrib as kd

ROWS = 13
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
VALID = (RNG.normal(size=(7, 4)).astype("float32"), RNG.normal(size=(7, 1)).astype("float32"))
FIT = {"batch_size": 6, "shuffle": False, "verbose": 0}  # batches of 6, 6 and 1 rows
BOTH = ("none", "mirrored3")


def small(optimizer=None):
    model = keras.Sequential([layers.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.5), "mse", metrics=["mae"])
    return model


def trained(name, callback=(), epochs=4, build=small, **options):
    """A model after `fit`, and its history."""
    model = made(strategy_named(name), build)
    history = model.fit(X, Y, epochs=epochs, validation_data=VALID, callbacks=callback, **{**FIT, **options})
    return model, history


def assert_alike(one, other):
    """Two results of `trained`: the same epochs, logs and weights."""
    (model, history), (its_model, its_history) = one, other
    assert its_history.epoch == history.epoch
    assert list(its_history.history) == list(history.history)
    for key, values in history.history.items():
        np.testing.assert_allclose(its_history.history[key], values, rtol=2e-5, atol=1e-6, err_msg=key)
    close(state_of(its_model), state_of(model))
    assert replicas_agree(its_model)


def assert_usable(model):
    """Whatever happened: no scope is entered, no replica is busy, and `fit` gives one device's numbers."""
    assert not kd.has_strategy()
    other = made(None, small)
    for variable, value in zip(other.variables, model.get_weights(), strict=True):
        variable.assign(value)
    other.optimizer.build(other.trainable_variables)
    for variable, its in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
        variable.assign(its.numpy())
    options = {"epochs": 2, **FIT}
    own, its = other.fit(X, Y, **options).history, model.fit(X, Y, **options).history
    np.testing.assert_allclose(its["loss"], own["loss"], rtol=2e-5)
    close(state_of(model), state_of(other))
    assert replicas_agree(model)


class TestModelCheckpoint:
    @pytest.mark.parametrize("weights_only", [True, False])
    @pytest.mark.parametrize("options", [{"save_best_only": True}, {"save_freq": 2}, {}])
    def test_the_same_files_with_the_same_weights(self, weights_only, options, tmp_path):
        results, files = [], []
        suffix = "{epoch:02d}.weights.h5" if weights_only else "{epoch:02d}.keras"
        for name in BOTH:
            pattern = str(tmp_path / name / suffix)
            (tmp_path / name).mkdir()
            checkpoint = callbacks.ModelCheckpoint(pattern, save_weights_only=weights_only, monitor="loss", **options)
            results.append(trained(name, [checkpoint]))
            files.append(sorted((tmp_path / name).iterdir()))
        assert [file.name for file in files[1]] == [file.name for file in files[0]]
        assert len(files[0]) >= 2
        assert_alike(*results)
        for own, its in zip(*files, strict=True):
            states = []
            for file in (own, its):
                model = made(None, small)
                model.optimizer.build(model.trainable_variables)
                if weights_only:
                    model.load_weights(file)
                else:
                    model = keras.models.load_model(file)
                states.append(model.get_weights())
            close(states[1], states[0])

    def test_the_file_of_an_epochs_middle_holds_the_weights_of_that_time(self, tmp_path):
        seen = []

        class Noting(callbacks.ModelCheckpoint):
            def _save_model(self, epoch, batch, logs):
                super()._save_model(epoch, batch, logs)
                loaded = keras.models.load_model(self.filepath)
                close(loaded.get_weights(), self.model.get_weights(), rtol=0, atol=0)
                seen.append((epoch, batch))

        result = trained("mirrored3", [Noting(str(tmp_path / "model.keras"), save_freq=2)], epochs=2)
        assert seen == [(0, 1), (1, 0), (1, 2)]
        assert_alike(trained("none", epochs=2), result)


def test_early_stopping_stops_at_the_same_epoch_and_restores_the_same_weights():
    results, stopped = [], []
    for name in BOTH:
        stopping = callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
        results.append(trained(name, [stopping], epochs=30))
        stopped.append((stopping.stopped_epoch, stopping.best_epoch))
    assert stopped[1] == stopped[0]
    assert 0 < stopped[0][0] < 29
    assert_alike(*results)
    best = trained("none", epochs=stopped[0][1] + 1)[0]
    close(results[1][0].get_weights(), best.get_weights())


def test_reduce_lr_on_plateau_gives_the_same_rates():
    results = []
    for name in BOTH:
        plateau = callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_lr=1e-3)
        results.append(trained(name, [plateau], epochs=12))
    rates = results[0][1].history["learning_rate"]
    assert len(set(rates)) > 2
    np.testing.assert_array_equal(results[1][1].history["learning_rate"], rates)
    assert_alike(*results)
    rate = results[1][0].optimizer._learning_rate
    assert len({float(component) for component in rate.components}) == 1


def test_learning_rate_scheduler_reaches_every_replica():
    rates = {name: [] for name in BOTH}
    results = []
    for name in BOTH:

        def schedule(epoch, rate, name=name):
            rates[name].append(rate)
            return rate * 0.7 if epoch % 2 else rate

        results.append(trained(name, [callbacks.LearningRateScheduler(schedule)], epochs=5))
    assert rates["mirrored3"] == rates["none"]
    assert len(set(rates["none"])) == 3
    assert_alike(*results)


def test_csv_logger_writes_the_same_rows(tmp_path):
    rows = []
    for name in BOTH:
        model, _ = trained(name, [callbacks.CSVLogger(tmp_path / f"{name}.csv")], epochs=3)
        logger = callbacks.CSVLogger(tmp_path / f"{name}.csv", append=True)
        model.fit(X, Y, epochs=2, validation_data=VALID, callbacks=[logger], **FIT)
        with open(tmp_path / f"{name}.csv", newline="") as file:
            rows.append(list(csv.reader(file)))
    assert rows[1][0] == rows[0][0] == ["epoch", "loss", "mae", "val_loss", "val_mae"]
    assert len(rows[0]) == len(rows[1]) == 6
    np.testing.assert_allclose(np.array(rows[1][1:], float), np.array(rows[0][1:], float), rtol=2e-5)


class Summaries:
    """Stands in for TensorFlow's module of this name, which TensorBoard's files are written with."""

    def __init__(self):
        self.writer, self.records, self.found = None, [], {}

    def create_file_writer(self, folder):
        return Writer(self, folder)

    @contextlib.contextmanager
    def record_if(self, condition):
        self.records.append(condition)
        yield
        self.records.pop()

    def scalar(self, name, data, step):
        if all(condition() if callable(condition) else condition for condition in self.records):
            self.found[(self.writer, name, int(step))] = np.array(float(data))

    def histogram(self, name, data, step):
        self.found[(self.writer, name, int(step))] = np.array(keras.ops.convert_to_numpy(data))


class Writer:
    def __init__(self, summaries, folder):
        self.summaries, self.name = summaries, folder.rpartition("/")[2]

    @contextlib.contextmanager
    def as_default(self, step=None):
        outer, self.summaries.writer = self.summaries.writer, self.name
        yield
        self.summaries.writer = outer

    def flush(self):
        pass

    def close(self):
        pass


def test_tensorboard_writes_the_same_events(tmp_path):
    results, events = [], []
    for name in BOTH:
        board = callbacks.TensorBoard(tmp_path / name, histogram_freq=1, update_freq="batch", write_graph=False)
        board._summary_module = Summaries()
        results.append(trained(name, [board], epochs=2))
        events.append(board._summary_module.found)
    assert list(events[1]) == list(events[0])
    assert sum(tag == "batch_loss" for _, tag, _ in events[0]) == 6
    assert sum(tag.endswith("kernel/histogram") for _, tag, _ in events[0]) == 2 * 2
    assert {("train", "epoch_loss", 1), ("validation", "epoch_loss", 1)} <= set(events[0])
    for key, value in events[0].items():
        if "per_second" not in key[1]:
            np.testing.assert_allclose(events[1][key], value, rtol=2e-5, atol=2e-6, err_msg=str(key))
    assert_alike(*results)


class Failing(callbacks.Callback):
    """Raises at one event, once."""

    def __init__(self, event, number, failure):
        super().__init__()
        self.number, self.failure, self.seen = number, failure, 0
        setattr(self, event, self.count)

    def count(self, *args, **kwargs):
        self.seen += 1
        if self.seen == self.number:
            self.failure()


class Interruption(Exception):
    pass


def interrupt():
    raise Interruption("in a callback")


class TestBackupAndRestore:
    def resumed(self, name, folder, build=small, **options):
        """Interrupted in the third epoch, then a new model of a new strategy goes on."""
        with pytest.raises(Interruption):
            trained(
                name,
                [callbacks.BackupAndRestore(folder, **options), Failing("on_train_batch_begin", 8, interrupt)],
                epochs=5,
                build=build,
            )
        saved = json.loads((folder / "training_metadata.json").read_text())["epoch"]
        assert saved == (1 if options.get("save_freq") == 4 else 2)
        return trained(name, [callbacks.BackupAndRestore(folder, **options)], epochs=5, build=build)

    @pytest.mark.parametrize("name", ["none", "one", "mirrored2", "mirrored3", "central2"])
    def test_a_second_fit_ends_as_an_uninterrupted_one(self, name, tmp_path):
        model, history = self.resumed(name, tmp_path / "backup")
        assert history.epoch == [2, 3, 4]
        whole, full = trained("none", epochs=5)
        close(state_of(model), state_of(whole))
        np.testing.assert_allclose(history.history["val_loss"], full.history["val_loss"][2:], rtol=2e-5)
        assert not (tmp_path / "backup").exists()

    def test_with_adam_and_accumulation(self, tmp_path):
        def build():
            return small(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))

        model, _ = self.resumed("mirrored3", tmp_path / "backup", build)
        close(state_of(model), state_of(trained("none", epochs=5, build=build)[0]))

    @pytest.mark.parametrize("freq", [1, 4])
    def test_backups_within_an_epoch(self, freq, tmp_path):
        """Keras begins the interrupted epoch anew with the weights of its middle; so do the replicas."""
        results = [self.resumed(name, tmp_path / name, save_freq=freq) for name in BOTH]
        assert_alike(*results)

    def test_one_backup_under_another_strategy(self, tmp_path):
        folder = tmp_path / "backup"
        with pytest.raises(Interruption):
            trained(
                "mirrored3", [callbacks.BackupAndRestore(folder), Failing("on_epoch_begin", 3, interrupt)], epochs=4
            )
        model, history = trained("central2", [callbacks.BackupAndRestore(folder)], epochs=4)
        assert history.epoch == [2, 3]
        close(state_of(model), state_of(trained("none", epochs=4)[0]))


@pytest.mark.parametrize("on_epoch", [True, False])
def test_swap_ema_weights(on_epoch):
    def build():
        return small(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5))

    results = [trained(name, [callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)], build=build) for name in BOTH]
    assert_alike(*results)


def test_lambda_callback_is_called_once_per_event():
    events = {name: [] for name in BOTH}
    for name in BOTH:
        note = events[name].append
        trained(
            name,
            [
                callbacks.LambdaCallback(
                    on_epoch_begin=lambda epoch, logs, note=note: note(("begin", epoch)),
                    on_epoch_end=lambda epoch, logs, note=note: note(("end", epoch, sorted(logs))),
                    on_train_batch_begin=lambda batch, logs, note=note: note(("batch", batch)),
                    on_train_batch_end=lambda batch, logs, note=note: note(("batch end", batch, sorted(logs))),
                    on_train_begin=lambda logs, note=note: note("train"),
                    on_train_end=lambda logs, note=note: note("trained"),
                    on_test_batch_end=lambda batch, logs, note=note: note(("test", batch)),
                )
            ],
            epochs=2,
        )
    assert events["mirrored3"] == events["none"]
    assert len(events["none"]) == 2 + 2 * (2 + 3 * 2 + 2)


@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_is_printed_once(verbose, capsys):
    printed = []
    for name in BOTH:
        trained(name, epochs=2, verbose=verbose)
        text = capsys.readouterr().out
        printed.append([line for line in text.replace("\b", "").splitlines() if "Strategy" not in line])
    assert len(printed[1]) == len(printed[0])
    for text in ("Epoch 1/2", "Epoch 2/2"):
        assert [sum(text in line for line in lines) for lines in printed] == [1, 1]
    counts = ["".join(lines).count("val_loss") for lines in printed]
    assert counts[1] == counts[0] > 0


def test_terminate_on_nan_stops_at_the_same_batch():
    seen = {name: [] for name in BOTH}
    x = X.copy()
    x[8] = np.nan  # in the second batch, of one replica
    for name in BOTH:
        model = made(strategy_named(name), small)
        noting = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, name=name: seen[name].append(batch))
        model.fit(x, Y, epochs=3, callbacks=[callbacks.TerminateOnNaN(), noting], **FIT)
        assert all(np.isnan(weight).all() for weight in model.get_weights())
    assert seen["mirrored3"] == seen["none"] == [0, 1]


def other_model(strategy):
    with scope_of(strategy):
        other = keras.Sequential([layers.Input((4,)), layers.Dense(1, kernel_initializer="ones")])
        other.compile("sgd", "mse")
    return other


def act_evaluate(callback):
    callback.seen += callback.model.evaluate(*VALID, batch_size=3, verbose=0)


def act_predict(callback):
    callback.seen += [float(callback.model.predict(VALID[0], batch_size=3, verbose=0).sum())]


def act_fit_of_the_same_strategy(callback):
    callback.seen += callback.fellow.fit(X, Y, **FIT).history["loss"]


def act_fit_of_no_strategy(callback):
    callback.seen += callback.plain.fit(X, Y, **FIT).history["loss"]


def act_fit_of_another_strategy(callback):
    callback.seen += callback.stranger.fit(X, Y, **FIT).history["loss"]


def act_make_a_model(callback):
    made_now = other_model(None)
    assert made_now._distribute_strategy is None
    callback.seen += made_now.fit(X, Y, **FIT).history["loss"]


def act_set_weights(callback):
    callback.model.set_weights([0.9 * weight for weight in callback.model.get_weights()])


def act_learning_rate(callback):
    callback.model.optimizer.learning_rate = float(callback.model.optimizer.learning_rate) * 0.9


def act_stop(callback):
    callback.model.stop_training = True


def act_save_and_load(callback):
    callback.model.save_weights(callback.folder / "model.weights.h5")
    callback.model.load_weights(callback.folder / "model.weights.h5")


def act_train_on_batch_of_a_fellow(callback):
    callback.seen += [float(callback.fellow.train_on_batch(X, Y))]


ACTIONS = {name.removeprefix("act_"): fn for name, fn in list(globals().items()) if name.startswith("act_")}


@pytest.mark.parametrize("event", ["on_train_batch_end", "on_epoch_end"])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_callback_that_does_more(action, event, tmp_path):
    results, seen = [], []
    for name in BOTH:
        strategy = strategy_named(name)
        model = made(strategy, small)
        acting = callbacks.Callback()
        acting.seen, acting.folder = [], tmp_path
        acting.fellow, acting.plain = other_model(strategy), other_model(None)
        acting.stranger = other_model(strategy_named("none" if name == "none" else "mirrored2"))
        setattr(acting, event, lambda number, logs=None, acting=acting: ACTIONS[action](acting))
        history = model.fit(X, Y, epochs=3, callbacks=[acting], **FIT)
        results.append((model, history))
        seen.append(acting.seen)
    assert_alike(*results)
    np.testing.assert_allclose(seen[1], seen[0], rtol=2e-5, atol=1e-6)
    assert_usable(results[1][0])


def test_logs_that_a_callback_adds_reach_the_next_one_and_the_history():
    class Adding(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs["batch_number"] = batch

        def on_epoch_end(self, epoch, logs=None):
            logs["twice"] = 2 * logs["loss"]

    results = [trained(name, [Adding()]) for name in BOTH]
    assert_alike(*results)
    history = results[1][1].history
    np.testing.assert_allclose(history["twice"], 2 * np.array(history["loss"]))


def keyboard_interrupt():
    raise KeyboardInterrupt


EVENTS = [
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_batch_begin",
    "on_test_end",
    "on_epoch_end",
    "on_train_end",
]


class TestInterruptions:
    @pytest.mark.parametrize("event", EVENTS)
    @pytest.mark.parametrize(
        ("failure", "kind"),
        [
            (interrupt, Interruption),
            (keyboard_interrupt, KeyboardInterrupt),
            (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
        ],
    )
    def test_in_a_callback(self, event, failure, kind):
        model = made(strategy_named("mirrored3"), small)
        threads = set(threading.enumerate())
        with pytest.raises(kind):
            model.fit(X, Y, epochs=2, validation_data=VALID, callbacks=[Failing(event, 1, failure)], **FIT)
        new = {thread for thread in threading.enumerate() if thread.name.startswith("keras_distrib")} - threads
        assert len(new) <= 3
        if not model.optimizer.built:
            model.fit(X, Y, **FIT)
        assert_usable(model)

    @pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
    def test_ctrl_c_while_replicas_run(self, method):
        """The replicas are all in a layer's call; the main thread waits for them."""
        running, interrupted = threading.Barrier(4), threading.Event()

        class Waiting(layers.Layer):
            armed = False

            def call(self, x):
                if self.armed and kd.get_replica_context() is not None:
                    running.wait(30)
                    interrupted.wait(30)
                return x

        def build():
            model = small()
            model = keras.Sequential([layers.Input((4,)), Waiting(name="waiting"), *model.layers])
            model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse", metrics=["mae"])
            return model

        model = made(strategy_named("mirrored3"), build)
        model.fit(X, Y, **FIT)
        waiting = model.get_layer("waiting")
        waiting.armed = True

        def press():
            running.wait(30)
            _thread.interrupt_main()
            interrupted.set()

        presser = threading.Thread(target=press)
        presser.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                arguments = (X[:6],) if method == "predict" else (X[:6], Y[:6])
                getattr(model, method)(*arguments, batch_size=6, verbose=0)
        finally:
            waiting.armed = False
            with contextlib.suppress(KeyboardInterrupt):
                presser.join(timeout=30)
        assert_usable(model)

    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
    def test_an_error_of_one_replica(self, error):
        class Raising(layers.Layer):
            armed = False

            def call(self, x):
                replica = kd.get_replica_context()
                if self.armed and replica is not None and replica.replica_id_in_sync_group == 1:
                    raise error("in replica 1")
                return x

        def build():
            model = small()
            model = keras.Sequential([layers.Input((4,)), Raising(name="raising"), *model.layers])
            model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse", metrics=["mae"])
            return model

        model = made(strategy_named("mirrored3"), build)
        model.fit(X, Y, **FIT)
        model.get_layer("raising").armed = True
        with pytest.raises(error, match="in replica 1"):
            model.fit(X, Y, **FIT)
        model.get_layer("raising").armed = False
        assert_usable(model)

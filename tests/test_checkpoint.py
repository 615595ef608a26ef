"""Checkpoints of custom loops: complete or absent, and restored under any strategy."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import torch
from processes import ROOT

import keras_distrib as kd

STRATEGIES = {
    "none": lambda: kd.get_strategy(),
    "one": lambda: kd.OneDeviceStrategy("cpu:0"),
    "mirrored2": lambda: kd.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored3": lambda: kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    "central2": lambda: kd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}
X = np.random.default_rng(0).normal(size=(11, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
BATCHES = [(torch.tensor(X[i : i + 4]), torch.tensor(Y[i : i + 4])) for i in range(0, 11, 4)]


class Loop:
    """A custom loop's objects, and its step."""

    def __init__(self, strategy):
        self.strategy = strategy
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.Dense(3, "relu"), keras.layers.Dropout(0.3, seed=3), keras.layers.Dense(1)]
            self.model = keras.Sequential([keras.Input((4,)), *layers])
            self.optimizer = keras.optimizers.Adam(0.01)
            self.metric = keras.metrics.MeanAbsoluteError()
            self.step = keras.Variable(0, dtype="int64", trainable=False)
        self.dataset = strategy.experimental_distribute_dataset(BATCHES)
        self.iterator = iter(self.dataset)
        self.checkpoint = kd.Checkpoint(
            model=self.model, optimizer=self.optimizer, metrics=[self.metric], step=self.step
        )

    def _step(self, batch):
        x, y = batch
        with kd.GradientTape() as tape:
            predictions = self.model(x, training=True)
            loss = kd.compute_average_loss(keras.losses.mean_squared_error(y, predictions), global_batch_size=4)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.metric.update_state(y, predictions)

    def run(self, batches):
        for batch in batches:
            self.strategy.run(self._step, args=(batch,))
            self.step.assign_add(1)
        return self

    def state(self):
        variables = [*self.model.variables, *self.optimizer.variables, *self.metric.variables, self.step]
        return [keras.ops.convert_to_numpy(variable.value) for variable in variables]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("restored_under", STRATEGIES)
@pytest.mark.parametrize("saved_under", STRATEGIES)
def test_restores_under_any_strategy(saved_under, restored_under, tmp_path):
    saved = Loop(STRATEGIES[saved_under]())
    saved.run(saved.dataset)
    path = saved.checkpoint.save(tmp_path / "loop")
    assert path == str(tmp_path / "loop-1")

    restored = Loop(STRATEGIES[restored_under]())
    with restored.strategy.scope():
        restored.optimizer.build(restored.model.trainable_variables)
    restored.checkpoint.restore(path).assert_consumed()
    assert int(restored.checkpoint.save_counter.value) == 1
    assert same(saved.state()[:-3], restored.state()[:-3])
    assert int(restored.step.value) == 3
    assert float(restored.metric.result()) == pytest.approx(float(saved.metric.result()), rel=1e-6)


def test_training_goes_on_as_if_never_interrupted(any_strategy, tmp_path):
    whole = Loop(any_strategy).run(Loop(any_strategy).dataset)
    whole.run(whole.dataset)

    first = Loop(any_strategy).run(Loop(any_strategy).dataset)
    path = first.checkpoint.save(tmp_path / "loop")
    second = Loop(any_strategy)  # its optimizer is built by its first step, after the restore
    status = second.checkpoint.restore(path)
    with pytest.raises(ValueError, match="unused=.*optimizer"):
        status.assert_consumed()
    second.run(second.dataset)
    status.assert_consumed()
    assert same(whole.state(), second.state())


def test_objects_take_their_state_when_they_are_built(two, tmp_path):
    class Nested(keras.layers.Layer):
        def build(self, shape):
            self.inner = keras.layers.Dense(2)  # made by build, unknown to restore
            self.inner.build(shape)
            self.scale = self.add_weight(shape=(2,), initializer="ones")

        def call(self, x):
            return self.inner(x) * self.scale

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.nested, self.dense = Nested(), keras.layers.Dense(1)

        def call(self, x):
            return self.dense(self.nested(x))

    with two.scope():
        saved = Model()
        two.run(saved, args=(torch.ones(2, 4),))
        for index, variable in enumerate(saved.variables):
            variable.assign(keras.ops.full(variable.shape, index + 0.5))
        restored = Model()
    path = kd.Checkpoint(model=saved).write(tmp_path / "nested")
    status = kd.Checkpoint(model=restored).restore(path)
    assert not restored.variables
    output = two.run(restored, args=(torch.ones(2, 4),))
    assert torch.equal(output.values[1], two.run(saved, args=(torch.ones(2, 4),)).values[1])
    assert same([v.numpy() for v in saved.variables], [v.numpy() for v in restored.variables])
    assert all(torch.equal(*variable.components) for variable in restored.variables)
    status.assert_consumed()


def test_a_model_of_fit_goes_on(any_strategy, tmp_path):
    def model():
        keras.utils.set_random_seed(2)
        with any_strategy.scope():
            made = keras.Sequential(
                [keras.layers.Dense(3, "tanh"), keras.layers.Dropout(0.2, seed=1), keras.layers.Dense(1)]
            )
            made.compile("adam", "mse")
        return made

    settings = {"batch_size": 4, "shuffle": False, "verbose": 0}
    whole = model()
    whole.fit(X, Y, epochs=3, **settings)
    first = model()
    first.fit(X, Y, epochs=1, **settings)
    path = kd.Checkpoint(first).save(tmp_path / "fit")
    second = model()
    kd.Checkpoint(second).restore(path)
    second.fit(X, Y, initial_epoch=1, epochs=3, **settings)
    assert same(whole.get_weights(), second.get_weights())


def test_state_that_replicas_hold_apart_is_saved_as_one_value(two, tmp_path):
    with two.scope():
        total = keras.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
        statistic = keras.Variable(0.0, trainable=False)
    value = two.experimental_distribute_values_from_function(
        lambda c: torch.tensor(3.0 + 2 * c.replica_id_in_sync_group)
    )
    two.run(total.assign, args=(value,))
    two.run(statistic.assign, args=(value,))
    path = kd.Checkpoint(total=total, statistic=statistic).write(tmp_path / "apart")
    three = kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with three.scope():
        into = keras.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
        mean = keras.Variable(0.0, trainable=False)
    kd.Checkpoint(total=into, statistic=mean).restore(path)
    assert float(into.value) == pytest.approx(8.0)
    assert float(into.components[1]) == pytest.approx(8 / 3)
    assert [float(part) for part in mean.components] == [4.0] * 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int32", "bool", "uint8"])
def test_dtypes(dtype, tmp_path):
    saved = keras.Variable(np.array([1, 0, 1]), dtype=dtype, trainable=False)
    restored = keras.Variable(np.array([0, 0, 0]), dtype=dtype, trainable=False)
    path = kd.Checkpoint(v=saved).write(tmp_path / "v")
    kd.Checkpoint(v=restored).restore(path).assert_consumed()
    assert torch.equal(saved.value, restored.value)
    assert restored.dtype == dtype


class TestWhatACheckpointHolds:
    def test_iterators_go_on_in_the_middle(self, any_strategy, tmp_path):
        dataset = any_strategy.experimental_distribute_dataset(BATCHES)
        iterator = iter(dataset)
        next(iterator)
        path = kd.Checkpoint(iterator=iterator).write(tmp_path / "i")
        resumed = iter(dataset)
        kd.Checkpoint(iterator=resumed).restore(path).assert_consumed()
        left = list(resumed)
        assert len(left) == 2
        rows = any_strategy.gather(left[0][0], axis=0)
        assert torch.equal(rows, BATCHES[1][0])

    def test_torch_objects_nested_checkpoints_and_containers(self, tmp_path):
        def make():
            linear = torch.nn.Linear(2, 1)
            inner = kd.Checkpoint(v=keras.Variable(1.0), seeds=keras.random.SeedGenerator(7))
            return kd.Checkpoint(linear=linear, inner=inner, many={"a": [keras.Variable(2.0)]})

        saved, restored = make(), make()
        saved.inner.v.assign(5.0)
        saved.inner.seeds.next()
        saved.many["a"][0].assign(6.0)
        path = saved.write(tmp_path / "t")
        restored.restore(path).assert_consumed()
        assert torch.equal(saved.linear.weight, restored.linear.weight)
        assert float(restored.inner.v.numpy()) == 5.0
        assert torch.equal(saved.inner.seeds.state.value, restored.inner.seeds.state.value)
        assert float(restored.many["a"][0].numpy()) == 6.0

    def test_what_has_no_state_is_refused(self, tmp_path):
        with pytest.raises(TypeError, match=r"Received: /?step=3 \(of type int\)"):
            kd.Checkpoint(step=3).write(tmp_path / "n")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", ["save", "_x", "save_counter"])
    def test_names_of_its_own_are_refused(self, name):
        with pytest.raises(ValueError, match=f"Received: {name}="):
            kd.Checkpoint(**{name: keras.Variable(1.0)})

    def test_an_object_is_saved_once(self, tmp_path):
        variable = keras.Variable(1.0)
        path = kd.Checkpoint(a=variable, b=[variable]).write(tmp_path / "once")
        kd.Checkpoint(a=variable).restore(path).assert_consumed()


class TestErrors:
    def test_shapes_that_differ_change_nothing(self, two, tmp_path):
        path = kd.Checkpoint(a=keras.Variable([5.0]), b=keras.Variable([1.0, 2.0])).write(tmp_path / "v")
        with two.scope():
            a, b = keras.Variable([0.0]), keras.Variable([0.0])
        with pytest.raises(ValueError, match=r"does not fit 'b'.*\(2,\).*\(1,\)"):
            kd.Checkpoint(a=a, b=b).restore(path)
        assert not a.numpy().any()

    def test_no_such_checkpoint(self, tmp_path):
        kd.Checkpoint(v=keras.Variable(1.0)).save(tmp_path / "v")
        with pytest.raises(FileNotFoundError, match=r"Checkpoints in that directory: \['v-1'\]"):
            kd.Checkpoint(v=keras.Variable(1.0)).restore(tmp_path / "w-1")

    def test_a_checkpoint_cut_short(self, tmp_path):
        path = kd.Checkpoint(v=keras.Variable(np.ones(1000))).save(tmp_path / "v")
        data = next(pathlib.Path(path).glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:300])
        variable = keras.Variable(np.zeros(1000))
        with pytest.raises(ValueError, match="cannot be read"):
            kd.Checkpoint(v=variable).restore(path)
        assert not variable.numpy().any()

    def test_nothing_to_restore(self):
        status = kd.Checkpoint(v=keras.Variable(1.0)).restore(None)
        with pytest.raises(ValueError, match="No checkpoint specified"):
            status.assert_consumed()
        assert status.expect_partial() is status

    def test_objects_without_a_value_are_named(self, tmp_path):
        path = kd.Checkpoint(a=keras.Variable(1.0)).write(tmp_path / "v")
        status = kd.Checkpoint(a=keras.Variable(0.0), b=keras.Variable(0.0)).restore(path)
        with pytest.raises(ValueError, match=r"without a value=\['b'\]"):
            status.assert_existing_objects_matched()

    def test_in_a_replica(self, two, tmp_path):
        with two.scope():
            checkpoint = kd.Checkpoint(v=keras.Variable(1.0))
        with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
            two.run(lambda: checkpoint.save(tmp_path / "v"))
        with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
            two.run(lambda: checkpoint.restore(tmp_path / "v-1"))

    def test_a_failed_write_keeps_what_was_there(self, tmp_path, monkeypatch):
        checkpoint = kd.Checkpoint(v=keras.Variable(1.0))
        path = checkpoint.write(tmp_path / "v")
        checkpoint.v.assign(2.0)

        def fail(*args, **kwargs):
            raise OSError("No space left on device")

        monkeypatch.setattr("keras_distrib.training.checkpoint_files.save_entries", fail)
        with pytest.raises(OSError, match="No space"):
            checkpoint.write(tmp_path / "v")
        with pytest.raises(OSError, match="No space"):
            checkpoint.save(tmp_path / "w")
        assert int(checkpoint.save_counter.value) == 0
        checkpoint.restore(path)
        assert float(checkpoint.v.numpy()) == 1.0
        assert [entry.name for entry in tmp_path.iterdir()] == ["v"]

    def test_something_else_is_there(self, tmp_path):
        (tmp_path / "v").write_text("mine")
        with pytest.raises(FileExistsError, match="something else than a checkpoint"):
            kd.Checkpoint(v=keras.Variable(1.0)).write(tmp_path / "v")
        assert (tmp_path / "v").read_text() == "mine"

    def test_threads_that_write_to_one_path(self, tmp_path):
        checkpoints = [kd.Checkpoint(v=keras.Variable(np.full(1000, float(number)))) for number in range(3)]
        errors = []

        def write(checkpoint):
            try:
                for _ in range(3):
                    checkpoint.write(tmp_path / "v")
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=write, args=(checkpoint,)) for checkpoint in checkpoints]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not errors
        variable = keras.Variable(np.zeros(1000))
        kd.Checkpoint(v=variable).restore(tmp_path / "v")
        assert len(set(variable.numpy().tolist())) == 1


class TestManager:
    def manager(self, directory, **options):
        variable = keras.Variable(0.0)
        options = {"max_to_keep": 2, **options}
        return kd.CheckpointManager(kd.Checkpoint(v=variable), directory, **options), variable

    def test_keeps_the_newest(self, tmp_path):
        manager, variable = self.manager(tmp_path / "new")
        assert manager.latest_checkpoint is None
        assert manager.checkpoints == []
        for value in range(4):
            variable.assign(float(value))
            assert manager.save() == str(tmp_path / "new" / f"ckpt-{value + 1}")
        assert manager.checkpoints == [str(tmp_path / "new" / f"ckpt-{number}") for number in (3, 4)]
        assert {entry.name for entry in (tmp_path / "new").iterdir()} == {"ckpt-3", "ckpt-4", "checkpoint"}
        assert kd.latest_checkpoint(tmp_path / "new") == manager.latest_checkpoint
        manager.checkpoint.restore(manager.checkpoints[0])
        assert float(variable.numpy()) == 2.0

    def test_a_new_process_goes_on(self, tmp_path):
        manager, variable = self.manager(tmp_path)
        variable.assign(7.0)
        manager.save()
        manager.save()
        again, variable = self.manager(tmp_path)
        assert again.restore_or_initialize() == str(tmp_path / "ckpt-2")
        assert float(variable.numpy()) == 7.0
        assert again.save() == str(tmp_path / "ckpt-3")
        assert again.checkpoints == [str(tmp_path / f"ckpt-{number}") for number in (2, 3)]

    @pytest.mark.parametrize("damage", [lambda index: index.write_text("{bad"), lambda index: index.unlink()])
    def test_a_list_that_cannot_be_read(self, tmp_path, damage):
        manager, _ = self.manager(tmp_path)
        manager.save()
        manager.save()
        before = manager.checkpoints
        damage(tmp_path / "checkpoint")
        assert manager.checkpoints == before
        manager.save()
        assert [pathlib.Path(path).name for path in manager.checkpoints] == ["ckpt-2", "ckpt-3"]

    def test_initializes_without_one(self, tmp_path):
        calls = []
        manager, _ = self.manager(tmp_path, init_fn=lambda: calls.append(1))
        assert manager.restore_or_initialize() is None
        assert calls == [1]

    def test_intervals(self, tmp_path):
        step = keras.Variable(0, dtype="int64", trainable=False)
        manager, _ = self.manager(tmp_path, step_counter=step, checkpoint_interval=3)
        saved = []
        for _ in range(7):
            saved.append(manager.save() is not None)
            step.assign_add(1)
        assert saved == [True, False, False, True, False, False, True]
        assert manager.save(check_interval=False) is not None

    def test_numbers_and_names_are_the_users(self, tmp_path):
        manager, _ = self.manager(tmp_path, checkpoint_name="best", max_to_keep=None)
        other, _ = self.manager(tmp_path, checkpoint_name="last")
        assert manager.save(checkpoint_number=40) == str(tmp_path / "best-40")
        other.save()
        assert manager.save() == str(tmp_path / "best-41")
        assert [pathlib.Path(path).name for path in manager.checkpoints] == ["best-40", "best-41"]
        assert [pathlib.Path(path).name for path in other.checkpoints] == ["last-1"]

    def test_keeps_one_for_each_time(self, tmp_path):
        manager, _ = self.manager(tmp_path, max_to_keep=1, keep_checkpoint_every_n_hours=0.0)
        for _ in range(3):
            manager.save()
        assert len(list(tmp_path.glob("ckpt-*"))) == 3

    def test_bad_settings(self, tmp_path):
        with pytest.raises(ValueError, match="Received: max_to_keep=0"):
            self.manager(tmp_path, max_to_keep=0)
        with pytest.raises(ValueError, match="`step_counter` should be passed"):
            self.manager(tmp_path, checkpoint_interval=3)


WRITER = """
import sys, keras, numpy as np, keras_distrib as kd
variable = keras.Variable(np.zeros(3_000_000, "float32"))
manager = kd.CheckpointManager(kd.Checkpoint(v=variable), sys.argv[1], max_to_keep=2)
manager.restore_or_initialize()
while True:
    variable.assign_add(np.ones(3_000_000, "float32"))
    print(manager.save(), flush=True)
"""


def test_a_killed_process_leaves_complete_checkpoints(tmp_path):
    values = []
    for attempt in range(3):
        environment = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
        )
        try:
            for _ in range(2):
                assert process.stdout.readline()
            time.sleep(0.013 * attempt)  # at another point of the write each time
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=30)
        variable = keras.Variable(np.zeros(3_000_000, "float32"))
        manager = kd.CheckpointManager(kd.Checkpoint(v=variable), tmp_path, max_to_keep=2)
        assert manager.restore_or_initialize() is not None
        value = variable.numpy()
        assert (value == value[0]).all()
        values.append(float(value[0]))
        assert len(manager.checkpoints) <= 2
    assert values == sorted(values)
    assert values[0] >= 2
    assert values[2] >= 6

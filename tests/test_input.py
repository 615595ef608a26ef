"""Distributed input: sources by calls, the end of the data, reading ahead, and bad input."""

import functools
import gc
import itertools
import threading
import time
import traceback

import grain
import keras
import numpy as np
import pandas as pd
import pytest
import torch

import keras_distrib as kd
from keras_distrib.data.prefetch import THREAD_NAME
from keras_distrib.options import InputContext, InputOptions, InputReplicationMode

X = np.random.default_rng(0).normal(size=(11, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
BATCHES = [(torch.tensor(X[i : i + 4]), torch.tensor(Y[i : i + 4])) for i in range(0, 11, 4)]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return X[index], Y[index]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


def generator():
    yield from BATCHES


# At its first use grain logs an exception, whose frames would keep a test's objects alive.
list(grain.MapDataset.source([0]).batch(1).to_iter_dataset())


def grain_batches(kind):
    dataset = grain.MapDataset.source([(x, y) for x, y in zip(X, Y, strict=True)]).batch(4)
    return dataset if kind == "map" else dataset.to_iter_dataset()


def write_files(folder):
    for index in range(4):
        np.savez(folder / f"{index}.npz", x=X[3 * index : 3 * index + 3], y=Y[3 * index : 3 * index + 3])


def read_file(path):
    data = np.load(path)
    yield data["x"], data["y"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return str(folder / "*.npz")


# Sources of global batches of 4 rows; each call makes a new one.
SOURCES = {
    "list": lambda _: BATCHES,
    "generator": lambda _: generator(),
    "generator function": lambda _: generator,
    "DataLoader": lambda _: torch.utils.data.DataLoader(Rows(), 4),
    "DataLoader, iterable": lambda _: torch.utils.data.DataLoader(Stream(), 4),
    "PyDataset": lambda _: Batches(),
    "grain MapDataset": lambda _: grain_batches("map"),
    "grain IterDataset": lambda _: grain_batches("iter"),
    "numpy dataset": lambda _: kd.get_strategy().make_experimental_numpy_dataset((X, Y)).batch(4),
    "files": lambda pattern: kd.data.from_files(pattern, read_file, batch_size=4),
}
# Datasets of rows, which need the batch size.
ROWS = {
    "arrays": lambda: (X, Y),
    "tensors": lambda: (torch.tensor(X), torch.tensor(Y)),
    "frames": lambda: (pd.DataFrame(X), pd.DataFrame(Y)),
    "torch Dataset": Rows,
    "torch IterableDataset": Stream,
}


def parts(batch):
    return [value.tolist() for value in batch.values]


def strategy_of(count):
    return kd.MirroredStrategy([f"cpu:{index}" for index in range(count)])


def model_of(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def expected():
    """What one device gives for arrays."""
    model = model_of(kd.get_strategy())
    history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return {
        "history": history,
        "weights": model.get_weights(),
        "evaluated": model.evaluate(X, Y, batch_size=4, verbose=0),
        "predicted": model.predict(X, batch_size=4, verbose=0),
    }


def assert_as_expected(model, expected, history=None):
    for own, one in zip(model.get_weights(), expected["weights"], strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-6)
    if history is not None:
        np.testing.assert_allclose(history.history["loss"], expected["history"]["loss"], rtol=1e-5)


class TestSources:
    @pytest.mark.parametrize("name", SOURCES)
    def test_distributed(self, name, mirrored, files):
        dataset = mirrored.experimental_distribute_dataset(SOURCES[name](files))
        seen = [mirrored.gather(x, axis=0) for x, _ in dataset]
        assert [len(rows) for rows in seen] == [4, 4, 3]
        assert np.array_equal(torch.cat(seen).numpy(), X)

    @pytest.mark.parametrize("name", ROWS)
    def test_rows_with_a_batch_size(self, name, mirrored):
        options = InputOptions(batch_size=4)
        seen = [mirrored.gather(x, axis=0) for x, _ in mirrored.experimental_distribute_dataset(ROWS[name](), options)]
        assert [len(rows) for rows in seen] == [4, 4, 3]
        np.testing.assert_allclose(torch.cat(seen).numpy(), X)

    @pytest.mark.parametrize("name", ROWS)
    def test_rows_need_one(self, name, two):
        with pytest.raises(ValueError, match=r"needs the global batch size.*batch_size=None.*InputOptions"):
            two.experimental_distribute_dataset(ROWS[name]())

    @pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras, of datasets of unknown length
    @pytest.mark.parametrize("name", [name for name in SOURCES if name != "list"])
    def test_in_fit_evaluate_and_predict(self, name, expected, files):
        strategy = strategy_of(3)
        model = model_of(strategy)
        if name == "generator":  # one pass each
            model.fit(SOURCES[name](files), shuffle=False, verbose=0)
            model.fit(SOURCES[name](files), shuffle=False, verbose=0)
            assert_as_expected(model, expected)
            return
        history = model.fit(SOURCES[name](files), epochs=2, shuffle=False, verbose=0)
        assert_as_expected(model, expected, history)
        np.testing.assert_allclose(model.evaluate(SOURCES[name](files), verbose=0), expected["evaluated"], rtol=1e-5)
        predicted = model.predict(SOURCES[name](files), verbose=0)
        np.testing.assert_allclose(predicted, expected["predicted"], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("name", [*SOURCES, *ROWS])
    def test_distributed_and_then_fit(self, name, expected, files):
        strategy = strategy_of(2)
        model = model_of(strategy)

        def dataset():
            if name in ROWS:
                return strategy.experimental_distribute_dataset(ROWS[name](), InputOptions(batch_size=4))
            return strategy.experimental_distribute_dataset(SOURCES[name](files))

        if name == "generator":
            model.fit(dataset(), verbose=0)
            history = model.fit(dataset(), verbose=0)
            assert_as_expected(model, expected)
        else:
            history = model.fit(dataset(), epochs=2, validation_data=dataset(), verbose=0)
            assert_as_expected(model, expected, history)
            assert history.history["val_loss"][-1] == pytest.approx(expected["evaluated"][0], rel=1e-5)
        np.testing.assert_allclose(model.predict(dataset(), verbose=0), expected["predicted"], rtol=1e-5, atol=1e-6)

    @pytest.mark.filterwarnings("ignore:Your input ran out of data")
    @pytest.mark.parametrize("name", ["torch Dataset", "torch IterableDataset"])
    def test_torch_datasets_in_fit(self, name, expected, any_strategy):
        model = model_of(any_strategy)
        history = model.fit(ROWS[name](), batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert_as_expected(model, expected, history)

    def test_methods_and_partials_that_yield_batches(self, two, expected):
        class Reader:
            def batches(self, source):
                yield from source

        model = model_of(two)
        model.fit(functools.partial(Reader().batches, BATCHES), verbose=0)
        model.fit(two.experimental_distribute_dataset(lambda: Reader().batches(BATCHES)), verbose=0)
        assert_as_expected(model, expected)

    def test_torch_datasets_are_shuffled_as_arrays_are(self, two):
        seen = []

        class Watching(Rows):
            def __getitem__(self, index):
                seen.append(index)
                return super().__getitem__(index)

        model_of(two).fit(Watching(), batch_size=4, epochs=1, verbose=0)
        assert sorted(seen[-11:]) == list(range(11))
        assert seen[-11:] != list(range(11))

    def test_hugging_face(self, two):
        import datasets

        columns = {"x": X.tolist(), "text": [str(i) for i in range(11)], "n": list(range(11))}
        dataset = datasets.Dataset.from_dict(columns)
        seen = list(two.experimental_distribute_dataset(dataset, InputOptions(batch_size=4)))
        assert parts(seen[2]["n"]) == [[8, 9], [10]]
        assert seen[0]["x"].values[0].shape == (2, 4)
        assert seen[0]["text"].values[1].tolist() == ["2", "3"]
        streamed = two.experimental_distribute_dataset(dataset.to_iterable_dataset(), InputOptions(batch_size=4))
        assert [parts(batch["n"]) for batch in streamed] == [parts(batch["n"]) for batch in seen]
        assert len(list(streamed)) == 3  # again
        with pytest.raises(ValueError, match="needs the global batch size"):
            two.experimental_distribute_dataset(dataset)

    def test_hugging_face_in_fit(self, expected, two):
        import datasets

        dataset = datasets.Dataset.from_dict({"x": X, "y": Y})
        model = model_of(two)
        history = model.fit(dataset, y="y", batch_size=4, epochs=2, verbose=0)
        assert_as_expected(model, expected, history)
        with pytest.raises(ValueError, match=r"must be the name of a column. Received: y='z', columns=\['x', 'y'\]"):
            model.fit(dataset, y="z", verbose=0)

    def test_unknown_sources(self, two):
        for source in (3, None, "path/to/files", b"x", object()):
            with pytest.raises(TypeError, match="`dataset` must be an iterable of batches.*Received: dataset="):
                two.experimental_distribute_dataset(source)
        with pytest.raises(TypeError, match="must return an iterable of batches"):
            next(iter(two.experimental_distribute_dataset(lambda: 3)))
        with pytest.raises(TypeError, match="`options` must be a `keras_distrib.InputOptions`"):
            two.experimental_distribute_dataset(BATCHES, 3)


class TestIterating:
    def test_a_second_iteration_starts_again(self, two):
        dataset = two.experimental_distribute_dataset([torch.arange(4), torch.arange(4, 6)])
        first = iter(dataset)
        next(first)
        assert [parts(batch) for batch in dataset] == [[[0, 1], [2, 3]], [[4], [5]]]
        assert parts(next(first)) == [[4], [5]]

    def test_a_generator_goes_on(self, two):
        dataset = two.experimental_distribute_dataset(torch.full((2,), i) for i in range(6))
        taken = [parts(batch)[0][0] for batch in itertools.islice(iter(dataset), 2)]
        taken += [parts(batch)[0][0] for batch in dataset]
        assert taken == [0, 1, 2, 3, 4, 5], "batches that were read ahead are lost"
        assert list(dataset) == []

    def test_optionals(self, two):
        iterator = iter(two.experimental_distribute_dataset([torch.arange(2)]))
        optional = iterator.get_next_as_optional()
        assert optional.has_value()
        assert parts(optional.get_value()) == [[0], [1]]
        ended = iterator.get_next_as_optional()
        assert not ended.has_value()
        with pytest.raises(kd.errors.OutOfRangeError, match="has no value"):
            ended.get_value()

    def test_reduce(self, two):
        dataset = two.experimental_distribute_dataset([torch.arange(4), torch.arange(4, 6)])
        total = dataset.reduce(0, lambda state, batch: state + int(two.reduce("SUM", batch, axis=0)))
        assert total == 15

    def test_lengths(self, two):
        assert len(two.experimental_distribute_dataset(BATCHES)) == 3
        for source in (generator, torch.utils.data.DataLoader(Stream(), 4)):
            with pytest.raises(TypeError, match="not known"):
                len(two.experimental_distribute_dataset(source))

    def test_specs_of_batches_of_one_size(self, two):
        loader = torch.utils.data.DataLoader(Rows(), 4, drop_last=True)
        spec = two.experimental_distribute_dataset(loader).element_spec
        assert spec[0].specs[0] == kd.TensorSpec([2, 4], "float32")
        odd = torch.utils.data.DataLoader(Rows(), 5, drop_last=True)
        assert two.experimental_distribute_dataset(odd).element_spec[0].specs[0].shape == (None, 4)

    def test_batches_without_rows_are_left_out(self, two):
        batches = [torch.ones(0, 2), torch.ones(3, 2), torch.ones(0, 2), torch.ones(1, 2)]
        steps = list(two.experimental_distribute_dataset(batches))
        assert [sum(batch.rows) for batch in steps] == [3, 1]

    def test_an_empty_source(self, two):
        assert list(two.experimental_distribute_dataset([])) == []

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float16, torch.bfloat16])
    def test_empty_parts_keep_dtype_and_shape(self, dtype):
        batch = {"a": torch.ones(1, 2, 3).to(dtype), "b": (torch.ones(1),)}
        dealt = next(iter(strategy_of(3).experimental_distribute_dataset([batch])))
        assert dealt["a"].values[2].shape == (0, 2, 3)
        assert dealt["a"].values[2].dtype is dtype
        assert dealt["b"][0].values[1].numpy().shape == (0,)

    def test_arrays_of_any_layout(self, two, tmp_path):
        expected = np.arange(12.0).reshape(4, 3)
        expected.tofile(tmp_path / "rows")
        layouts = [
            expected.copy(order="F"),
            expected[::-1][::-1],
            expected.T.copy().T,
            np.broadcast_to(expected, (1, 4, 3))[0],
            np.memmap(tmp_path / "rows", dtype="float64", mode="r", shape=(4, 3)),
            expected[::-1],
        ]
        for array in layouts:
            dataset = two.experimental_distribute_dataset(array, InputOptions(batch_size=3))
            rows = torch.cat([two.gather(batch, axis=0) for batch in dataset])
            assert np.array_equal(rows.numpy(), array)

    def test_sparse_batches(self, two):
        batch = torch.eye(3).to_sparse()
        split = next(iter(two.experimental_distribute_dataset([batch])))
        assert split.values[0].is_sparse
        assert [part.to_dense().tolist() for part in split.values] == [[[1, 0, 0], [0, 1, 0]], [[0, 0, 1]]]

    def test_dates_are_refused(self, two):
        dates = pd.Series(pd.date_range("2020", periods=3))
        with pytest.raises(ValueError, match="no dtype for dates and times. Received: an array of dtype datetime64"):
            list(two.experimental_distribute_dataset(dates, InputOptions(batch_size=2)))

    def test_what_torch_has_no_dtype_for(self, two):
        batch = next(
            iter(
                two.experimental_distribute_dataset(
                    [{"s": np.array(["a", "b", "c"]), "u": np.arange(3, dtype="uint16")}]
                )
            )
        )
        assert [value.tolist() for value in batch["s"].values] == [["a", "b"], ["c"]]
        assert [value.tolist() for value in batch["u"].values] == [[0, 1], [2]]


class TestResuming:
    @pytest.mark.parametrize("name", [name for name in SOURCES if name != "generator"])
    def test_in_the_middle_of_an_epoch(self, name, two, files):
        dataset = two.experimental_distribute_dataset(SOURCES[name](files))
        whole = [two.gather(x, axis=0) for x, _ in dataset]
        for taken in range(4):
            iterator = iter(dataset)
            for _ in range(taken):
                next(iterator)
            resumed = iter(two.experimental_distribute_dataset(SOURCES[name](files)))
            resumed.set_state(iterator.get_state())
            rest = [two.gather(x, axis=0) for x, _ in resumed]
            assert len(rest) == 3 - taken
            assert all(torch.equal(a, b) for a, b in zip(rest, whole[taken:], strict=True))

    def test_random_access_reads_nothing_twice(self, two):
        loaded = []

        class Watching(Rows):
            def __getitem__(self, index):
                loaded.append(index)
                return super().__getitem__(index)

        iterator = iter(two.experimental_distribute_dataset(Watching(), InputOptions(batch_size=4, prefetch=0)))
        iterator.set_state({"batches": 2})
        next(iterator)
        assert loaded == [8, 9, 10]

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
    def test_stateful_data_loader(self, two):
        from torchdata.stateful_dataloader import StatefulDataLoader

        def loader():
            return StatefulDataLoader(Rows(), batch_size=4)

        iterator = iter(two.experimental_distribute_dataset(loader()))
        next(iterator)
        state = iterator.get_state()
        assert "loader" in state
        resumed = iter(two.experimental_distribute_dataset(loader()))
        resumed.set_state(state)
        assert np.array_equal(two.gather(next(resumed)[0], axis=0).numpy(), X[4:8])

    def test_grain_keeps_its_own_state(self, two):
        iterator = iter(two.experimental_distribute_dataset(grain_batches("iter")))
        next(iterator)
        assert "grain" in iterator.get_state()

    def test_an_iterator_goes_back(self, two):
        iterator = iter(two.experimental_distribute_dataset(BATCHES))
        next(iterator)
        state = iterator.get_state()
        rest = len(list(iterator))
        iterator.set_state(state)
        assert len(list(iterator)) == rest == 2

    def test_what_cannot_be_resumed(self, two):
        shorter = iter(two.experimental_distribute_dataset(generator))
        with pytest.raises(ValueError, match="fewer batches than were taken. Received: state=.*batches=3"):
            shorter.set_state({"batches": 5})
            next(shorter)
        iterator = iter(two.experimental_distribute_dataset(generator()))
        next(iterator)
        next(iterator)
        with pytest.raises(ValueError, match="one-shot source cannot go back"):
            iterator.set_state({"batches": 1})


class TestFromFunction:
    def test_batches_are_dealt_in_turn(self, two):
        """Golden values: tf.distribute 2.21, two replicas."""
        contexts = []

        def dataset_fn(context):
            contexts.append(context)
            return torch.arange(5).split(2)

        dataset = two.distribute_datasets_from_function(lambda c: list(dataset_fn(c)))
        assert [parts(batch) for batch in dataset] == [[[0, 1], [2, 3]], [[4], []]]
        assert contexts == [InputContext(1, 0, 2)]
        assert len(dataset) == 2
        assert [parts(batch) for batch in dataset] == [[[0, 1], [2, 3]], [[4], []]]
        three = two.distribute_datasets_from_function(lambda c: [torch.arange(2), torch.tensor([2])])
        assert [parts(batch) for batch in three] == [[[0, 1], [2]]]

    def test_scalars(self, two):
        dataset = two.distribute_datasets_from_function(lambda c: range(3))
        steps = list(dataset)
        assert parts(steps[0]) == [0, 1]
        assert steps[1].rows == (1, 0)  # the original drops this row
        assert [int(value) for value in two.run(lambda x: x + 1, args=(steps[0],)).values] == [1, 2]

    def test_for_each_replica(self, two):
        contexts = []

        def dataset_fn(context):
            contexts.append(context)
            return [torch.tensor([context.input_pipeline_id])] * (2 + context.input_pipeline_id)

        options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
        dataset = two.distribute_datasets_from_function(dataset_fn, options)
        assert [parts(batch) for batch in dataset] == [[[0], [1]], [[0], [1]], [[], [1]]]
        assert contexts == [InputContext(2, 0, 2), InputContext(2, 1, 2)]
        with pytest.raises(NotImplementedError, match="only supported in `distribute_datasets_from_function`"):
            two.experimental_distribute_dataset(BATCHES, options)
        with pytest.raises(NotImplementedError, match="several replicas"):
            kd.OneDeviceStrategy("cpu:0").distribute_datasets_from_function(dataset_fn, options)

    def test_resuming(self, two):
        def dataset():
            return two.distribute_datasets_from_function(lambda c: list(torch.arange(10).split(2)))

        iterator = iter(dataset())
        next(iterator)
        resumed = iter(dataset())
        resumed.set_state(iterator.get_state())
        assert [parts(batch) for batch in resumed] == [[[4, 5], [6, 7]], [[8, 9], []]]

    def test_training_is_exact_at_the_end_of_the_data(self, expected):
        """Per-replica batches of 2: the steps see 4, 4 and 3 rows, as one device does."""
        strategy = strategy_of(2)

        def dataset_fn(context):
            size = context.get_per_replica_batch_size(4)
            return [(torch.tensor(X[i : i + size]), torch.tensor(Y[i : i + size])) for i in range(0, 11, size)]

        model = model_of(strategy)
        history = model.fit(strategy.distribute_datasets_from_function(dataset_fn), epochs=2, verbose=0)
        assert_as_expected(model, expected, history)

    def test_what_dataset_functions_get_wrong(self, two):
        with pytest.raises(TypeError, match="must take one argument, an `InputContext`"):
            two.distribute_datasets_from_function(lambda: BATCHES)
        with pytest.raises(TypeError, match="`dataset_fn` must return a dataset.*returned 3"):
            two.distribute_datasets_from_function(lambda context: 3)
        with pytest.raises(TypeError, match="`dataset_fn` must be callable"):
            two.distribute_datasets_from_function(BATCHES)

    def test_the_default_strategy_hands_it_through(self):
        assert kd.get_strategy().distribute_datasets_from_function(lambda context: context) == InputContext()

    def test_contexts(self):
        assert InputContext(num_replicas_in_sync=6).get_per_replica_batch_size(12) == 2
        with pytest.raises(ValueError, match="The `global_batch_size` 10 is not divisible by `num_replicas_in_sync` 4"):
            InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(10)
        assert str(InputContext()) == "tf.distribute.InputContext(input pipeline id 0, total: 1)"

    def test_options(self):
        assert InputOptions().experimental_fetch_to_device is True
        with pytest.raises(ValueError, match="can not be set to True when experimental_fetch_to_device is True"):
            InputOptions(experimental_fetch_to_device=True, experimental_place_dataset_on_device=True)
        with pytest.raises(ValueError, match="you must also specify `PER_REPLICA`"):
            InputOptions(experimental_place_dataset_on_device=True)
        with pytest.raises(ValueError, match="Received: prefetch=-1"):
            InputOptions(prefetch=-1)
        with pytest.raises(TypeError, match="Received: auto_shard_policy='DATA'"):
            InputOptions(auto_shard_policy="DATA")


class TestCreators:
    def creator(self, **options):
        def dataset_fn(context):
            size = context.get_per_replica_batch_size(4)
            rows = [(torch.tensor(X[i : i + size]), torch.tensor(Y[i : i + size])) for i in range(0, 8, size)]
            return lambda: itertools.cycle(rows)

        return kd.DatasetCreator(dataset_fn, **options)

    def test_in_fit_evaluate_and_predict(self, any_strategy):
        results = []
        for strategy in (any_strategy, kd.get_strategy()):
            model = model_of(strategy)
            creator = self.creator(input_options=InputOptions(prefetch=2))
            history = model.fit(
                creator, epochs=2, steps_per_epoch=3, validation_data=creator, validation_steps=2, verbose=0
            )
            evaluated = model.evaluate(creator, steps=2, verbose=0)
            predicted = model.predict(creator, steps=2, verbose=0)
            results.append(
                [*model.get_weights(), np.array(history.history["val_loss"]), np.array(evaluated), predicted]
            )
        for own, one in zip(*results, strict=True):
            np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-6)

    def test_steps_are_needed(self, two):
        model = model_of(two)
        for call in (model.fit, model.evaluate, model.predict):
            with pytest.raises(ValueError, match="When using a `DatasetCreator`, `steps_per_epoch`"):
                call(self.creator(), verbose=0)

    def test_bad_creators(self, two):
        with pytest.raises(TypeError, match="must be a `callable`. Received: dataset_fn=3"):
            kd.DatasetCreator(3)
        with pytest.raises(TypeError, match="`input_options` for `DatasetCreator`"):
            kd.DatasetCreator(generator, input_options=3)
        with pytest.raises(TypeError, match="must return a dataset"):
            model_of(two).fit(kd.DatasetCreator(lambda context: 3), steps_per_epoch=1, verbose=0)


class TestNumpyDatasets:
    def rows(self, count=10):
        return kd.get_strategy().make_experimental_numpy_dataset(np.arange(count))

    def batches(self, dataset):
        return [batch.tolist() for batch in dataset]

    def test_batches_share_storage(self):
        array = np.arange(8.0)
        batches = list(kd.get_strategy().make_experimental_numpy_dataset(array).batch(4))
        assert np.shares_memory(batches[1], array)
        strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        dataset = strategy.make_experimental_numpy_dataset(array).batch(8)
        split = next(iter(strategy.experimental_distribute_dataset(dataset)))
        assert split.values[1].data_ptr() == array.ctypes.data + 32

    def test_views(self):
        rows = self.rows()
        assert self.batches(rows.batch(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert self.batches(rows.batch(4, drop_remainder=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert self.batches(rows.shard(3, 1).batch(2)) == [[1, 4], [7]]
        assert self.batches(rows.batch(4).shard(2, 1)) == [[4, 5, 6, 7]]
        assert self.batches(rows.batch(4).repeat(2)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
        assert self.batches(self.rows(3).repeat(2).batch(4)) == [[0, 1, 2, 0], [1, 2]]
        assert [int(row) for row in rows.shard(5, 0)] == [0, 5]
        assert len(rows) == 10
        assert len(rows.batch(4)) == 3

    def test_shuffling(self):
        shuffled = self.rows().shuffle(seed=1).batch(10)
        first, second = self.batches(shuffled), self.batches(shuffled)
        assert sorted(first[0]) == list(range(10))
        assert first != second
        again = self.rows().shuffle(seed=1).batch(10)
        assert [self.batches(again), self.batches(again)] == [first, second]
        fixed = self.rows().shuffle(seed=1, reshuffle_each_iteration=False).batch(10)
        assert self.batches(fixed) == self.batches(fixed) == first
        twice = self.batches(self.rows().shuffle(seed=1).repeat(2).batch(10))
        assert twice[0] != twice[1]
        assert self.batches(self.rows().shuffle().batch(10)) != self.batches(self.rows().shuffle().batch(10))

    def test_a_shuffled_pass_resumes(self, two):
        dataset = two.experimental_distribute_dataset(self.rows(12).shuffle(seed=5).batch(4))
        list(dataset)
        iterator = iter(dataset)  # the second pass, with an order of its own
        next(iterator)
        state = iterator.get_state()
        rest = [parts(batch) for batch in iterator]
        resumed = iter(two.experimental_distribute_dataset(self.rows(12).shuffle(seed=5).batch(4)))
        resumed.set_state(state)
        assert [parts(batch) for batch in resumed] == rest

    def test_endless(self, two):
        endless = self.rows(3).repeat().batch(2)
        assert self.batches(itertools.islice(endless, 4)) == [[0, 1], [2, 0], [1, 2], [0, 1]]
        with pytest.raises(TypeError, match="endless"):
            len(endless)
        x = two.make_experimental_numpy_dataset((X, Y)).repeat().batch(4)
        model = model_of(two)
        model.fit(x, epochs=2, steps_per_epoch=3, verbose=0)
        with pytest.raises(ValueError, match="An endless dataset needs the number of steps"):
            model.fit(x, verbose=0)
        with pytest.raises(ValueError, match="An endless dataset needs the number of steps"):
            model.fit(two.experimental_distribute_dataset(x), verbose=0)

    def test_nested_structures(self, two):
        dataset = two.make_experimental_numpy_dataset({"x": X, "y": (Y, pd.Series(range(11))), "none": None}).batch(4)
        batch = next(iter(two.experimental_distribute_dataset(dataset)))
        assert batch["none"] is None
        assert parts(batch["y"][1]) == [[0, 1], [2, 3]]

    def test_bad_settings(self):
        with pytest.raises(ValueError, match=r"same number of rows.*Received: shapes=\[\(3,\), \(2,\)\]"):
            kd.get_strategy().make_experimental_numpy_dataset((np.ones(3), np.ones(2)))
        with pytest.raises(ValueError, match="at least one array"):
            kd.get_strategy().make_experimental_numpy_dataset({})
        with pytest.raises(ValueError, match="Received: batch_size=0"):
            self.rows().batch(0)
        with pytest.raises(ValueError, match="batched by=2"):
            self.rows().batch(2).batch(2)
        with pytest.raises(ValueError, match="num_shards=2, index=2"):
            self.rows().shard(2, 2)
        with pytest.raises(ValueError, match="Call `shuffle` before `repeat`"):
            self.rows().repeat().shuffle()
        with pytest.raises(ValueError, match="Call the `batch` method"):
            kd.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(self.rows())


class TestFiles:
    def test_rebatched_over_files(self, files):
        for size, lengths in ((4, [4, 4, 3]), (11, [11]), (5, [5, 5, 1]), (1, [1] * 11)):
            batches = list(kd.data.from_files(files, read_file, batch_size=size))
            assert [len(x) for x, _ in batches] == lengths
            assert np.array_equal(np.concatenate([x for x, _ in batches]), X)
        assert [len(x) for x, _ in kd.data.from_files(files, read_file)] == [3, 3, 3, 2]
        assert [len(x) for x, _ in kd.data.from_files(files, read_file, 4, drop_remainder=True)] == [4, 4]

    def test_interleaved(self, tmp_path):
        def reader(path):
            return ([f"{path[-1]}{chunk}"] for chunk in range(2))

        for name in "abc":
            (tmp_path / name).touch()
        source = kd.data.from_files(str(tmp_path / "*"), lambda p: (np.array(c) for c in reader(p)), cycle_length=2)
        assert [chunk[0] for chunk in source] == ["a0", "b0", "a1", "b1", "c0", "c1"]

    def test_names_of_shards(self, tmp_path):
        for index in range(12):
            np.save(tmp_path / f"shard-{index:03}.npy", np.array([index]))
        source = kd.data.from_files(str(tmp_path / "shard-{002..011}.npy"), lambda path: [np.load(path)])
        assert [int(batch[0]) for batch in source] == list(range(2, 12))
        with pytest.raises(FileNotFoundError, match="without a match="):
            kd.data.from_files([str(tmp_path / "*.npy"), str(tmp_path / "*.txt")], read_file)
        with pytest.raises(ValueError, match="Received: batch_size=0"):
            kd.data.from_files(str(tmp_path / "*"), read_file, batch_size=0)

    def test_few_files_are_open_at_a_time(self, files):
        opened = []

        def reader(path):
            opened.append(path)
            yield from read_file(path)

        batches = iter(kd.data.from_files(files, reader, batch_size=3))
        next(batches)
        assert len(opened) == 1


class TestReadingAhead:
    def threads(self):
        return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]

    def wait_for(self, condition):
        deadline = time.monotonic() + 5
        while not condition() and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        return condition()

    @pytest.mark.parametrize(("prefetch", "ahead"), [(None, 2), (0, 0), (1, 1), (3, 3)])
    def test_as_many_batches_as_asked_for(self, two, prefetch, ahead):
        made = []

        def source():
            for index in range(20):
                made.append(index)
                yield torch.full((2,), index)

        iterator = iter(two.experimental_distribute_dataset(source, InputOptions(prefetch=prefetch)))
        next(iterator)
        if ahead:  # as many as wait, and the one that the thread holds
            assert self.wait_for(lambda: len(made) >= 1 + ahead)
            time.sleep(0.05)
            assert len(made) in (1 + ahead, 2 + ahead)
        else:
            assert len(made) == 1
            assert not self.threads()

    def test_reading_and_computing_overlap(self, two):
        overlapping = []
        computing = threading.Event()

        def source():
            for _ in range(6):
                overlapping.append(computing.is_set())
                time.sleep(0.01)
                yield torch.ones(2)

        for batch in two.experimental_distribute_dataset(source):
            computing.set()
            two.run(lambda x: time.sleep(0.02), args=(batch,))
            computing.clear()
        assert any(overlapping)

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_an_error_arrives_at_its_step_once(self, two, prefetch):
        def read_third():
            raise KeyError("row 17")

        def source():
            yield torch.ones(2)
            yield torch.ones(2)
            read_third()

        iterator = iter(two.experimental_distribute_dataset(source, InputOptions(prefetch=prefetch)))
        next(iterator)
        next(iterator)
        with pytest.raises(KeyError, match="row 17") as caught:
            next(iterator)
        assert "read_third" in "".join(traceback.format_tb(caught.value.__traceback__))
        with pytest.raises(StopIteration):
            next(iterator)
        assert not self.threads()

    def test_an_error_in_fit(self, two):
        def source():
            yield BATCHES[0]
            raise OSError("disk")

        model = model_of(two)
        with pytest.raises(OSError, match="disk"):
            model.fit(two.experimental_distribute_dataset(source), verbose=0)
        model.fit(two.experimental_distribute_dataset(BATCHES), verbose=0)
        assert self.wait_for(lambda: not self.threads())

    def test_threads_end_with_their_iterators(self, two):
        def source():
            while True:
                yield torch.ones(2)

        dataset = two.experimental_distribute_dataset(source)
        iterators = [iter(dataset) for _ in range(3)]
        for iterator in iterators:
            next(iterator)
        assert len(self.threads()) == 3
        del iterators, iterator
        assert self.wait_for(lambda: not self.threads())

    def test_ctrl_c(self, two):
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            for _ in two.experimental_distribute_dataset(_interrupting()):
                pass
        assert time.monotonic() - started < 10
        assert two.run(lambda: 1) == 1

    def test_a_step_is_not_slowed_by_a_full_queue(self, two):
        dataset = two.experimental_distribute_dataset([torch.ones(2)] * 50)
        started = time.monotonic()
        assert len(list(dataset)) == 50
        assert time.monotonic() - started < 2

    def test_sources_draw_from_the_callers_generator(self, two):
        def source():
            for _ in range(3):
                yield keras.random.uniform((2,))

        drawn = []
        for prefetch in (0, 2):
            keras.utils.set_random_seed(3)
            batches = list(two.experimental_distribute_dataset(source, InputOptions(prefetch=prefetch)))
            drawn.append([parts(batch) for batch in batches])
        assert drawn[0] == drawn[1]

    def test_memory_stays_flat(self, two):
        import resource

        dataset = two.experimental_distribute_dataset([torch.ones(64, 256)] * 4)

        def epochs(count):
            for _ in range(count):
                for batch in dataset:
                    two.run(lambda x: x.sum(), args=(batch,))
            gc.collect()
            return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        epochs(20)
        objects, peak = epochs(20)
        more_objects, more_peak = epochs(180)
        assert more_objects - objects < 500
        assert more_peak - peak < 20_000  # KiB


def _interrupting():
    """A source that is interrupted while the main thread waits for it."""
    import _thread

    yield torch.ones(2)
    _thread.interrupt_main()
    time.sleep(1)
    yield torch.ones(2)


class TestInFit:
    def test_a_dataset_of_another_strategy(self, two):
        other = kd.OneDeviceStrategy("cpu:0")
        with pytest.raises(ValueError, match="A distributed dataset goes with models of its own strategy"):
            model_of(two).fit(other.experimental_distribute_dataset(BATCHES), verbose=0)
        with pytest.raises(ValueError, match="a model of 'no strategy'"):
            model_of(kd.get_strategy()).fit(other.experimental_distribute_dataset(BATCHES), verbose=0)

    def test_arguments_that_are_part_of_the_dataset(self, two):
        model = model_of(two)
        dataset = two.experimental_distribute_dataset(BATCHES)
        for arguments in ({"y": Y}, {"class_weight": {0: 1.0}}, {"sample_weight": np.ones(11)}, {"batch_size": 4}):
            (name,) = arguments
            with pytest.raises(ValueError, match=f"`{name}` should not be passed. Received: {name}="):
                model.fit(dataset, verbose=0, **arguments)

    def test_steps_per_epoch_go_on_in_the_data(self, two):
        seen = []

        class Model(keras.Sequential):
            def train_step(self, data):
                seen.append(int(data[0][0, 0]))
                return super().train_step(data)

        with two.scope():
            model = Model([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        batches = [(torch.full((1, 1), float(i)), torch.ones(1, 1)) for i in range(6)]
        model.fit(two.experimental_distribute_dataset(batches), epochs=3, steps_per_epoch=2, verbose=0)
        assert seen[-6:] == [0, 1, 2, 3, 4, 5]

    def test_a_source_that_is_exhausted_says_so(self, two):
        model = model_of(two)
        with pytest.warns(UserWarning, match="Your input ran out of data"):
            model.fit(two.experimental_distribute_dataset(generator()), epochs=2, steps_per_epoch=3, verbose=0)

    def test_mismatched_rows_and_ragged_batches(self, two):
        model = model_of(two)
        with pytest.raises(ValueError, match="same number of rows"):
            model.fit(two.experimental_distribute_dataset([(torch.ones(4, 4), torch.ones(3, 1))]), verbose=0)
        weighted = [(torch.ones(4, 4), torch.ones(4, 1), torch.ones(2))]
        with pytest.raises(ValueError, match="same number of rows"):
            model.fit(two.experimental_distribute_dataset(weighted), verbose=0)
        with pytest.raises(ValueError, match="Call the `batch` method"):
            next(iter(two.experimental_distribute_dataset([([[1.0], [2.0, 3.0]],)])))

    def test_predict_returns_rows_in_order_of_the_source(self, mirrored):
        with mirrored.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
        batches = [torch.arange(7.0)[:, None], torch.arange(7.0, 9.0)[:, None]]
        predicted = model.predict(mirrored.experimental_distribute_dataset(batches), verbose=0)
        assert predicted[:, 0].tolist() == [2.0 * i for i in range(9)]

    def test_weights_and_dicts(self, two):
        weights = np.linspace(0.1, 2, 11).astype("float32")
        results = []
        for strategy in (two, kd.get_strategy()):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
                model = keras.Model(inputs, keras.layers.Dense(1)(inputs["a"] * inputs["b"]))
                model.compile(keras.optimizers.SGD(0.1), "mse")
            dataset = strategy.make_experimental_numpy_dataset(({"a": X, "b": X}, Y, weights)).batch(4)
            model.fit(dataset, epochs=2, verbose=0)
            results.append(model.get_weights())
        for own, one in zip(*results, strict=True):
            np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-6)

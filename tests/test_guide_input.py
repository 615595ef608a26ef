"""The snippets of the guide on distributed input, in this package's spelling, and tf.data as a source."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import keras_distrib as kd
from keras_distrib.specs import PerReplicaSpec


def parts(batch):
    return [value.tolist() for value in batch.values]


def strategy_of(count):
    return kd.MirroredStrategy([f"cpu:{index}" for index in range(count)])


def pairs(rows, batch_size):
    return tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(rows).batch(batch_size)


class TestGuide:
    def test_devices(self):
        assert [device.name for device in kd.config.list_logical_devices()][:2] == ["/device:CPU:0", "/device:CPU:1"]

    def test_one_global_batch_is_fed_in_one_step(self, two):
        features, labels = next(iter(two.experimental_distribute_dataset(pairs(100, 16))))
        assert [tuple(value.shape) for value in features.values] == [(8, 1), (8, 1)]
        assert [tuple(value.shape) for value in labels.values] == [(8, 1), (8, 1)]

    @pytest.mark.parametrize(
        ("count", "batch_size", "drop", "replicas", "expected"),
        [
            (6, 4, False, 2, [[[0, 1], [2, 3]], [[4], [5]]]),
            (9, 4, False, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]),
            (5, 4, False, 2, [[[0, 1], [2, 3]], [[4], []]]),
            (7, 5, False, 2, [[[0, 1, 2], [3, 4]], [[5], [6]]]),
            (3, 1, False, 2, [[[0], []], [[1], []], [[2], []]]),
            (6, 4, True, 2, [[[0, 1], [2, 3]]]),
            (4, 4, False, 3, [[[0, 1], [2, 3], []]]),
            (8, 4, False, 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
            (6, 4, False, 3, [[[0, 1], [2, 3], []], [[4], [5], []]]),
            (4, 4, False, 5, [[[0], [1], [2], [3], []]]),
            (6, 4, False, 5, [[[0], [1], [2], [3], []], [[4], [5], [], [], []]]),
        ],
    )
    def test_rebatching(self, count, batch_size, drop, replicas, expected):
        """Golden values: the guide's, and tf.distribute 2.21 for in-memory data."""
        dataset = tf.data.Dataset.range(count).batch(batch_size, drop_remainder=drop)
        dealt = strategy_of(replicas).experimental_distribute_dataset(dataset)
        assert [parts(batch) for batch in dealt] == expected
        assert len(dealt) == len(expected)

    def test_auto_shard_policy_of_tf_data(self):
        from keras_distrib.data.sources import as_source

        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        assert as_source(pairs(64, 16).with_options(options)).auto_shard_policy is kd.AutoShardPolicy.DATA
        assert as_source(pairs(64, 16)).auto_shard_policy is kd.AutoShardPolicy.AUTO

    def test_dataset_function(self, two):
        def dataset_fn(input_context):
            batch_size = input_context.get_per_replica_batch_size(16)
            dataset = pairs(64, 16).unbatch()
            dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
            return dataset.batch(batch_size).prefetch(2)

        steps = list(two.distribute_datasets_from_function(dataset_fn))
        assert len(steps) == 4
        assert [tuple(value.shape) for value in steps[0][0].values] == [(8, 1), (8, 1)]

    def test_for_loop(self, two):
        @kd.function
        def train_step(inputs):
            features, labels = inputs
            return labels - 0.3 * features

        losses = [two.run(train_step, args=(x,)) for x in two.experimental_distribute_dataset(pairs(100, 16))]
        assert len(losses) == 7
        assert losses[0].values[0][0, 0] == pytest.approx(0.7)

    def test_explicit_iterators(self, two):
        dataset = two.experimental_distribute_dataset(pairs(100, 16))
        steps = 0
        for _ in range(10):
            iterator = iter(dataset)
            for step in range(5):
                two.run(lambda x: x, args=(iterator.get_next() if step % 2 else next(iterator),))
                steps += 1
        assert steps == 50

    def test_a_loop_of_steps_meets_the_end(self, two):
        iterator = iter(two.experimental_distribute_dataset(pairs(32, 16)))

        @kd.function
        def train_fn(iterator):
            for _ in range(5):
                two.run(lambda x: x, args=(iterator.get_next(),))

        with pytest.raises(kd.errors.OutOfRangeError):
            train_fn(iterator)

    def test_get_next_as_optional(self, two):
        iterator = iter(two.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(4)))
        seen = []

        @kd.function
        def train_fn(distributed_iterator):
            for _ in range(5):
                optional_data = distributed_iterator.get_next_as_optional()
                if not optional_data.has_value():
                    break
                results = two.run(lambda x: x, args=(optional_data.get_value(),))
                seen.append([value.tolist() for value in two.experimental_local_results(results)])

        train_fn(iterator)
        assert seen == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]

    def test_element_spec(self, two):
        dataset = two.experimental_distribute_dataset(pairs(100, 16))
        spec = kd.TensorSpec([None, 1], "float32")
        assert dataset.element_spec == (PerReplicaSpec(spec, spec), PerReplicaSpec(spec, spec))

        @kd.function(input_signature=[dataset.element_spec])
        def train_step(per_replica_inputs):
            return two.run(lambda inputs: 2 * inputs[0], args=(per_replica_inputs,))

        for _ in range(2):
            iterator = iter(dataset)
            for _ in range(5):
                output = train_step(next(iterator))
        assert output.values[1].tolist() == [[2.0]] * 8

    def test_specs_of_batches_that_are_all_alike(self, two):
        for size, rows in ((4, 2), (5, None)):
            dropped = tf.data.Dataset.range(20).batch(size, drop_remainder=True)
            assert two.experimental_distribute_dataset(dropped).element_spec.specs[0].shape == (rows,)

    def test_predictions_are_put_in_order(self, two):
        dataset = tf.data.Dataset.range(24).enumerate().batch(6)

        def predict(index, inputs):
            return index, 2 * inputs

        result = {}
        for index, inputs in two.experimental_distribute_dataset(dataset):
            output_index, outputs = two.run(predict, args=(index, inputs))
            rows = [int(i) for part in two.experimental_local_results(output_index) for i in part.numpy()]
            values = [int(v) for part in two.experimental_local_results(outputs) for v in part.numpy()]
            result.update(zip(rows, values, strict=True))
        assert result == {i: 2 * i for i in range(24)}

    def test_values_from_a_function(self, two):
        values = two.experimental_distribute_values_from_function(
            lambda context: torch.tensor(context.replica_id_in_sync_group)
        )
        for _ in range(4):
            assert [int(value) for value in two.run(lambda x: x, args=(values,)).values] == [0, 1]

    def test_generators(self, two):
        def input_gen():
            while True:
                yield np.random.rand(4)

        iterator = iter(two.experimental_distribute_dataset(input_gen))
        for _ in range(4):
            result = two.run(lambda x: x, args=(next(iterator),))
            assert [tuple(value.shape) for value in result.values] == [(2,), (2,)]


class TestPreprocessing:
    def test_lookup_in_the_pipeline_of_fit(self, two):
        with two.scope():
            layer = keras.layers.IntegerLookup(vocabulary=[10, 20, 30])
            model = keras.Sequential([keras.layers.Embedding(5, 2), keras.layers.Flatten(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x, y = np.array([[10], [20], [99], [30], [10]]), np.ones((5, 1), "float32")
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2).map(lambda x, y: (layer(x), y))
        history = model.fit(dataset, epochs=2, shuffle=False, verbose=0)
        assert np.isfinite(history.history["loss"]).all()
        seen = [parts(x) for x, _ in two.experimental_distribute_dataset(dataset)]
        assert seen == [[[[1]], [[2]]], [[[0]], [[3]]], [[[1]], []]]

    def test_a_vocabulary_in_a_file(self, two, tmp_path):
        (tmp_path / "vocabulary.txt").write_text("a\nb\nc\nd\nf\n")
        with two.scope():
            layer = keras.layers.StringLookup(vocabulary=str(tmp_path / "vocabulary.txt"))

        def dataset_fn(input_context):
            dataset = tf.data.Dataset.from_tensor_slices(["a", "c", "e"]).repeat()
            dataset = dataset.batch(input_context.get_per_replica_batch_size(4))
            dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
            return dataset.map(layer)

        iterator = iter(two.distribute_datasets_from_function(dataset_fn))
        assert [parts(next(iterator)) for _ in range(3)] == [[[1, 3], [0, 1]], [[3, 0], [1, 3]], [[0, 1], [3, 0]]]

    def test_adapted_layers_are_equal_on_every_replica(self, any_strategy):
        x = np.random.default_rng(0).normal(3, 2, size=(11, 4)).astype("float32")
        results = []
        for strategy in (any_strategy, kd.get_strategy()):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                layer = keras.layers.Normalization()
                layer.adapt(x)
                model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(x, x.sum(1), batch_size=4, shuffle=False, verbose=0)
            for variable in layer.variables:
                stored = getattr(variable, "stored", (variable.value,))
                assert all(torch.equal(stored[0], part) for part in stored)
            results.append(model.get_weights())
        for own, one in zip(*results, strict=True):
            np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-5)


class TestTFData:
    def test_structures_and_strings(self, two):
        dataset = tf.data.Dataset.from_tensor_slices({"s": ["a", "b", "c"], "x": (np.ones((3, 2)), [1, 2, 3])}).batch(3)
        batch = next(iter(two.experimental_distribute_dataset(dataset)))
        assert [value.tolist() for value in batch["s"].values] == [[b"a", b"b"], [b"c"]]
        assert parts(batch["x"][1]) == [[1, 2], [3]]

    @pytest.mark.parametrize("kind", ["ragged", "sparse"])
    def test_what_torch_has_no_tensor_for(self, two, kind):
        value = tf.ragged.constant([[1], [2, 3]]) if kind == "ragged" else tf.sparse.from_dense([[1, 0], [0, 2]])
        dataset = tf.data.Dataset.from_tensors(value)
        with pytest.raises(ValueError, match="Make it dense in the pipeline"):
            next(iter(two.experimental_distribute_dataset(dataset)))

    def test_scalars_need_batches(self, two):
        with pytest.raises(ValueError, match="Call the `batch` method"):
            next(iter(two.experimental_distribute_dataset(tf.data.Dataset.range(4))))

    def test_in_fit_evaluate_and_predict(self, any_strategy):
        x = np.random.default_rng(0).normal(size=(11, 4)).astype("float32")
        dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(4)
        results = []
        for strategy in (any_strategy, kd.get_strategy()):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(dataset, epochs=2, shuffle=False, verbose=0)
            if strategy is any_strategy:
                distributed = strategy.experimental_distribute_dataset(dataset)
                assert model.evaluate(distributed, verbose=0) == pytest.approx(model.evaluate(dataset, verbose=0))
                creator = kd.DatasetCreator(lambda context: dataset.unbatch().batch(2).repeat())
                model.evaluate(creator, steps=3, verbose=0)
            results.append([*model.get_weights(), model.predict(dataset, verbose=0)])
        for own, one in zip(*results, strict=True):
            np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-6)

    def test_resuming(self, two):
        dataset = tf.data.Dataset.range(10).batch(4)
        iterator = iter(two.experimental_distribute_dataset(dataset))
        next(iterator)
        resumed = iter(two.experimental_distribute_dataset(dataset))
        resumed.set_state(iterator.get_state())
        assert [parts(batch) for batch in resumed] == [[[4, 5], [6, 7]], [[8], [9]]]

    def test_an_endless_dataset_needs_steps(self, two):
        with two.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        endless = two.experimental_distribute_dataset(pairs(4, 4).repeat())
        with pytest.raises(ValueError, match="An endless dataset needs the number of steps"):
            model.fit(endless, verbose=0)
        model.fit(endless, steps_per_epoch=2, epochs=2, verbose=0)

    def test_files_are_sharded(self, tmp_path):
        from keras_distrib.data.pipeline import Pipeline, Pipelines, shard_source
        from keras_distrib.data.sources import as_source

        for index in range(3):
            (tmp_path / f"{index}.txt").write_text("".join(f"{index}{line}\n" for line in range(2)))

        def rows(policy, worker, workers):
            dataset = tf.data.TextLineDataset(sorted(str(path) for path in tmp_path.iterdir())).batch(2)
            own = Pipelines(worker, workers, 1)
            pipeline = Pipeline(*shard_source(as_source(dataset), policy, own), own)
            return [[line.decode() for line in s.batch[s.rows[0].start : s.rows[0].stop]] for s in pipeline]

        flat = [[line for batch in rows(kd.AutoShardPolicy.FILE, worker, 2) for line in batch] for worker in range(2)]
        assert flat == [["00", "01", "20", "21"], ["10", "11"]]
        assert [line for batch in rows(kd.AutoShardPolicy.AUTO, 1, 2) for line in batch] == ["10", "11"]
        with pytest.raises(ValueError, match="Could not apply FILE based sharding"):
            rows(kd.AutoShardPolicy.FILE, 0, 4)
        assert [line for batch in rows(kd.AutoShardPolicy.AUTO, 0, 4) for line in batch] == ["00", "10", "20"]

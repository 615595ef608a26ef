"""`keras_distrib.function`: steps, loops and methods, with checked signatures."""

import copy

import keras
import numpy as np
import pytest
import torch

import keras_distrib as kd
from keras_distrib.specs import PerReplicaSpec


class TestDecorating:
    def test_with_and_without_parentheses(self):
        @kd.function
        def bare(x):
            """Doubles."""
            return 2 * x

        @kd.function()
        def called(x):
            return 2 * x

        assert [bare(2), called(3), kd.function(lambda x: x + 1)(1)] == [4, 6, 2]
        assert bare.__name__ == "bare"
        assert bare.__doc__ == "Doubles."
        assert bare.python_function(2) == 4
        assert bare.input_signature is None

    def test_settings_of_the_original_are_accepted(self):
        assert kd.function(lambda: 1, autograph=False, jit_compile=True, reduce_retracing=True)() == 1

    def test_methods(self):
        class Trainer:
            def __init__(self, factor):
                self.factor = factor

            @kd.function
            def step(self, x):
                return self.factor * x

            @kd.function(input_signature=[kd.TensorSpec([], "float32")])
            def checked(self, x):
                return self.factor * x

            @kd.function
            @classmethod
            def of_class(cls, x):
                return cls, x

            @kd.function
            @staticmethod
            def free(x):
                return x

        one, two = Trainer(1), Trainer(2)
        assert [one.step(3), two.step(3), Trainer.step(two, 4)] == [3, 6, 8]
        assert float(two.checked(1.5)) == 3.0
        assert one.of_class(1) == Trainer.of_class(1) == (Trainer, 1)
        assert one.free(1) == Trainer.free(2) - 1 == 1
        with pytest.raises(TypeError, match="Binding inputs"):
            two.checked("a")
        assert copy.deepcopy(two).step(1) == 2

    def test_nested(self):
        @kd.function
        def inner(x):
            return x + 1

        @kd.function
        def outer(x):
            return inner(x) * inner(x)

        assert outer(1) == 4

    def test_what_cannot_be_decorated(self):
        with pytest.raises(TypeError, match="3 is not a callable object"):
            kd.function(3)
        with pytest.raises(TypeError, match="input_signature must be either a tuple or a list"):
            kd.function(lambda x: x, input_signature=3)
        with pytest.raises(TypeError, match=r"possibly nested sequence of TensorSpec objects, got invalid args \[3\]"):
            kd.function(lambda x: x, input_signature=[3])


class TestSignatures:
    spec = kd.TensorSpec([None, 2], "float32")

    def test_numbers_lists_and_arrays_become_tensors(self):
        fn = kd.function(lambda x: x * 2, input_signature=[self.spec])
        for value in (
            [[1.0, 2.0]],
            np.ones((3, 2)),
            torch.ones(3, 2),
            keras.Variable(np.ones((1, 2)), dtype="float32"),
        ):
            assert fn(value).dtype is torch.float32
        assert torch.equal(fn(x=torch.ones(1, 2)), torch.full((1, 2), 2.0))

    @pytest.mark.parametrize(
        ("args", "kwargs", "text"),
        [
            ((torch.ones(3, 3),), {}, r"Can not cast TensorSpec\(shape=\(3, 3\), dtype='float32'"),
            ((torch.ones(3, 2, dtype=torch.int32),), {}, "Can not cast .*int32"),
            ((torch.ones(2),), {}, "Can not cast"),
            ((torch.ones(3, 2), 1), {}, "too many positional arguments"),
            ((), {}, "missing a required argument: 'x'"),
            ((1,), {"y": 1}, "got an unexpected keyword argument 'y'"),
            (("a",), {}, "cannot convert 'a'"),
        ],
    )
    def test_what_does_not_fit(self, args, kwargs, text):
        @kd.function(input_signature=[self.spec])
        def fn(x):
            raise AssertionError("must not run")

        with pytest.raises(TypeError, match=f"Binding inputs to tf.function failed due to .*{text}"):
            fn(*args, **kwargs)

    def test_arguments_with_defaults_need_no_spec(self):
        fn = kd.function(lambda x, y=2: x + y, input_signature=[kd.TensorSpec([])])
        assert float(fn(1.0)) == 3.0
        with pytest.raises(TypeError, match="takes 1 arguments"):
            fn(1.0, 3.0)

    def test_nested_specs(self):
        fn = kd.function(
            lambda x, *rest: (x, rest), input_signature=[{"a": [self.spec]}, kd.TensorSpec([None], "int64")]
        )
        x, rest = fn({"a": [np.ones((1, 2))]}, [1, 2])
        assert x["a"][0].shape == (1, 2)
        assert rest[0].dtype is torch.int64
        with pytest.raises(TypeError, match=r"must be a dict with the keys \['a'\]"):
            fn({"b": 1}, [1])
        with pytest.raises(TypeError, match="must be a sequence of 1 parts"):
            fn({"a": []}, [1])

    def test_specs(self):
        assert kd.TensorSpec((None, 3), torch.float32) == kd.TensorSpec([None, 3], np.dtype("float32"))
        assert kd.TensorSpec(None).is_compatible_with(torch.ones(1, 2))
        assert not kd.TensorSpec([None]).is_compatible_with(torch.ones(1, 2))
        assert hash(kd.TensorSpec([1])) == hash(kd.TensorSpec([1]))
        with pytest.raises(ValueError, match=r"negative lengths.*Received: shape=\[-1\]"):
            kd.TensorSpec([-1])
        with pytest.raises(TypeError, match="Received: shape="):
            kd.TensorSpec(["a"])


class TestInLoops:
    def data(self):
        x = np.arange(10, dtype="float32").reshape(5, 2)
        return [(torch.tensor(x[:4]), torch.ones(4)), (torch.tensor(x[4:]), torch.ones(1))]

    def test_the_element_spec_of_a_dataset(self, two):
        dataset = two.experimental_distribute_dataset(self.data())
        assert dataset.element_spec == (
            PerReplicaSpec(kd.TensorSpec([None, 2]), kd.TensorSpec([None, 2])),
            PerReplicaSpec(kd.TensorSpec([None]), kd.TensorSpec([None])),
        )
        assert iter(dataset).element_spec == dataset.element_spec

        @kd.function(input_signature=[dataset.element_spec])
        def step(inputs):
            return two.run(lambda x: x[0].sum(), args=(inputs,))

        results = [float(two.reduce("SUM", step(batch), axis=None)) for batch in dataset]
        assert results == [28.0, 17.0]
        with pytest.raises(TypeError, match="must be a per-replica value of 2 replicas"):
            step((torch.ones(3, 2), torch.ones(3)))

    def test_reading_the_spec_takes_no_batch(self, any_strategy):
        taken = []

        def source():
            for batch in self.data():
                taken.append(1)
                yield batch

        dataset = any_strategy.experimental_distribute_dataset(source())
        assert dataset.element_spec is not None
        assert len(list(dataset)) == 2
        assert len(taken) == 2

    def test_an_empty_dataset_has_no_spec(self, two):
        with pytest.raises(ValueError, match="no element_spec"):
            two.experimental_distribute_dataset([]).element_spec  # noqa: B018

    def test_one_device_has_plain_specs(self):
        dataset = kd.OneDeviceStrategy("cpu:0").experimental_distribute_dataset([torch.ones(4, 2)])
        assert dataset.element_spec == kd.TensorSpec([None, 2])
        assert isinstance(next(iter(dataset)), torch.Tensor)

    def test_whole_loops(self, any_strategy):
        with any_strategy.scope():
            total = keras.Variable(0.0, aggregation="sum", trainable=False)

        def step(x):
            total.assign_add(x.sum())

        @kd.function
        def train(dataset):
            steps = 0
            for x, _ in dataset:
                any_strategy.run(step, args=(x,))
                steps += 1
                if steps == 5:
                    break
            return steps

        @kd.function
        def several_steps(iterator, steps_per_loop):
            for _ in range(steps_per_loop):
                any_strategy.run(lambda batch: step(batch[0]), args=(next(iterator),))

        dataset = any_strategy.experimental_distribute_dataset(self.data() * 4)
        assert train(dataset) == 5
        assert float(total.numpy()) == 3 * 28.0 + 2 * 17.0
        total.assign(0.0)
        iterator = iter(dataset)
        several_steps(iterator, 2)
        several_steps(iterator, 2)
        assert float(total.numpy()) == 2 * (28.0 + 17.0)
        with pytest.raises(kd.errors.OutOfRangeError):
            while True:
                iterator.get_next()

    def test_a_function_in_run_and_run_in_a_function(self, two):
        @kd.function
        def step(x):
            return x * x

        @kd.function
        def distributed(x):
            return two.run(step, args=(x,))

        value = two.experimental_distribute_values_from_function(
            lambda c: torch.tensor(float(c.replica_id_in_sync_group + 2))
        )
        assert [float(part) for part in distributed(value).values] == [4.0, 9.0]


class TestResults:
    def test_what_run_returns_carries_no_graph(self, any_strategy):
        with any_strategy.scope():
            v = keras.Variable(3.0)
        loss = any_strategy.run(lambda: v * v)
        total = any_strategy.reduce("MEAN", loss, axis=None)
        assert total.numpy() == 9.0
        assert all(not part.requires_grad for part in any_strategy.experimental_local_results(loss))

"""What each kind of distributed variable reads and writes, in each context.

Golden values: tf.distribute 2.21 on two logical CPUs, replica values 3 and 5.
"""

import copy

import keras
import numpy as np
import pytest
import torch

import keras_distrib as kd
from keras_distrib.values import PerReplica
from keras_distrib.variables import CentralVariable, MirroredVariable, SyncOnReadVariable


def own_value() -> torch.Tensor:
    return torch.tensor(3.0 + 2 * kd.get_replica_context().replica_id_in_sync_group)


def components(variable) -> list[float]:
    return [float(component.detach()) for component in variable.components]


def make(strategy, initial=1.0, **options):
    with strategy.scope():
        return keras.Variable(initial, trainable=False, **options)


@pytest.fixture
def central():
    return kd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])


class TestKinds:
    def test_by_synchronization_and_strategy(self, two, central):
        assert type(make(two)) is MirroredVariable
        assert type(make(two, synchronization="on_write", aggregation="mean")) is MirroredVariable
        assert type(make(two, synchronization="on_read", aggregation="sum")) is SyncOnReadVariable
        assert type(make(central)) is CentralVariable
        assert type(make(central, synchronization="on_read", aggregation="sum")) is SyncOnReadVariable
        assert type(make(kd.MirroredStrategy(["cpu:0"]))) is MirroredVariable
        assert type(keras.Variable(1.0)) is keras.Variable

    def test_bad_options(self, two):
        with two.scope():
            with pytest.raises(ValueError, match="aggregation=MEAN and a non-floating dtype is not supported"):
                keras.Variable(1, dtype="int32", aggregation="mean")
            with pytest.raises(ValueError, match="`NONE` variable synchronization mode is not supported"):
                keras.Variable(1.0, synchronization="none")
            with pytest.raises(ValueError, match="Invalid value for argument `aggregation`"):
                keras.Variable(1.0, aggregation="max")

    def test_replicas_start_equal(self, mirrored):
        with mirrored.scope():
            variable = keras.Variable(keras.random.normal((3,)))
            made = keras.Variable("glorot_uniform", shape=(2, 3))
        for v in (variable, made):
            assert all(torch.equal(v.components[0], component) for component in v.components)
            assert len({component.data_ptr() for component in v.components}) == mirrored.num_replicas_in_sync

    def test_repr_shows_every_component(self, two):
        text = repr(make(two))
        assert text.startswith("MirroredVariable:{")
        assert "0: <cpu: value=1.0>" in text
        assert "1: <cpu: value=1.0>" in text

    def test_trainable_is_switched_on_every_component(self, two, central):
        for strategy in (two, central):
            with strategy.scope():
                variable = keras.Variable(1.0)
            assert all(component.requires_grad for component in variable.components)
            variable.trainable = False
            assert not any(component.requires_grad for component in variable.components)

    def test_users_subclass(self, two):
        class Counter(keras.Variable):
            def count(self):
                self.assign_add(1.0)

        with two.scope():
            counter = Counter(0.0)
        assert isinstance(counter, Counter)
        counter.count()
        assert components(counter) == [1, 1]

    def test_deepcopy_is_independent(self, two):
        variable = make(two)
        other = copy.deepcopy(variable)
        other.assign(5.0)
        assert components(variable) == [1, 1]
        assert components(other) == [5, 5]
        assert other.strategy is two

    def test_a_copy_is_made_in_its_own_scope_or_none(self, two):
        variable = make(two)
        with two.scope():
            assert copy.deepcopy(variable).strategy is two
        with kd.OneDeviceStrategy("cpu:0").scope(), pytest.raises(RuntimeError, match="Mixing different"):
            copy.deepcopy(variable)

    def test_names_of_the_enumerations(self, two):
        variable = make(two, aggregation=kd.VariableAggregation.SUM, synchronization=kd.VariableSynchronization.ON_READ)
        assert type(variable) is SyncOnReadVariable
        two.run(lambda: variable.assign(own_value()))
        assert float(variable.numpy()) == 8
        with two.scope(), pytest.raises(ValueError, match="`NONE` variable synchronization"):
            keras.Variable(1.0, synchronization=kd.VariableSynchronization.NONE)

    def test_a_variable_made_in_run_is_one_variable(self, two):
        made = []

        def step():
            if not made or len(made) < 2:
                made.append(keras.Variable(own_value(), trainable=False))
            return made[0].value * 1

        values = two.run(step).values
        assert made[0] is made[1]
        assert [float(value) for value in values] == [3, 3]  # the first replica's value, on all

    def test_arithmetic_and_numpy(self, two):
        variable = make(two, 2.0)
        assert float(variable + 1) == 3
        assert variable.numpy() == 2
        result = two.run(lambda: variable * own_value())
        assert [float(v) for v in result.values] == [6, 10]


class TestMirrored:
    @pytest.mark.parametrize(
        ("aggregation", "method", "expected"),
        [
            ("none", "assign", [3, 5]),
            ("none", "assign_add", [4, 6]),
            ("none", "assign_sub", [-2, -4]),
            ("sum", "assign", [8, 8]),
            ("sum", "assign_add", [9, 9]),
            ("sum", "assign_sub", [-7, -7]),
            ("mean", "assign", [4, 4]),
            ("mean", "assign_add", [5, 5]),
            ("mean", "assign_sub", [-3, -3]),
            ("only_first_replica", "assign", [3, 3]),
            ("only_first_replica", "assign_add", [4, 4]),
            ("only_first_replica", "assign_sub", [-2, -2]),
        ],
    )
    def test_in_replicas(self, two, aggregation, method, expected):
        variable = make(two, aggregation=aggregation)
        two.run(lambda: getattr(variable, method)(own_value()))
        assert components(variable) == expected

    @pytest.mark.parametrize("aggregation", ["none", "mean", "only_first_replica"])
    def test_literals_in_replicas(self, two, aggregation):
        variable = make(two, aggregation=aggregation)
        two.run(lambda: variable.assign(7.0))
        assert components(variable) == [7, 7]

    def test_a_literal_is_no_part_of_a_sum(self, two, central):
        for strategy in (two, central):
            variable = make(strategy, aggregation="sum")
            for method in ("assign", "assign_add", "assign_sub"):
                with pytest.raises(ValueError, match="A non-DistributedValues value 7.0 cannot be reduced"):
                    strategy.run(lambda v=variable, m=method: getattr(v, m)(7.0))
            strategy.run(lambda v=variable: v.assign(torch.tensor(7.0)))
            assert float(variable.numpy()) == 14
            one = make(kd.OneDeviceStrategy("cpu:0"), aggregation="sum")
            one.strategy.run(lambda v=one: v.assign(7.0))
            assert float(one.numpy()) == 7

    @pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
    def test_across_replicas(self, two, aggregation):
        variable = make(two, aggregation=aggregation)
        variable.assign(9.0)
        assert components(variable) == [9, 9]
        variable.assign_add(1.0)
        variable.assign_sub(3.0)
        assert components(variable) == [7, 7]
        variable.assign(PerReplica([3.0, 5.0]))
        assert components(variable) == [3, 5]
        with two.scope():
            variable.assign_add(PerReplica([1.0, 2.0]))
        assert components(variable) == [4, 7]

    def test_state_that_replicas_write_reads_as_the_mean_of_those_that_wrote(self):
        strategy = kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
        variable = make(strategy, 1.0)
        counter = make(strategy, 0, dtype="int32")
        batch = next(iter(strategy.experimental_distribute_dataset([torch.arange(2.0)])))

        def step(x):
            variable.assign(x.sum() + 4)
            counter.assign(3 + kd.get_replica_context().replica_id_in_sync_group)

        strategy.run(step, args=(batch,))
        assert components(variable) == [4, 5, 4.5]  # one without rows follows the others
        assert float(variable.value) == 4.5
        assert int(counter.value) == 3
        variable.synchronize()
        counter.synchronize()
        assert components(variable) == [4.5, 4.5, 4.5]
        assert components(counter) == [3, 4, 3]

    def test_reads_in_replicas_are_their_own(self, two):
        variable = make(two)
        variable.assign(PerReplica([3.0, 5.0]))
        assert [float(v) for v in two.run(lambda: variable.value * 1).values] == [3, 5]

    def test_gradients_do_not_flow_through_assign(self, two):
        with two.scope():
            weight, state = keras.Variable(2.0), keras.Variable(0.0, trainable=False)

        def step():
            state.assign(weight * 3)
            loss = state * 1.0
            return loss.requires_grad

        assert two.run(step) is False

    def test_other_strategies_are_refused(self, two):
        variable = make(two)
        other = kd.OneDeviceStrategy("cpu:0")
        with other.scope(), pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
            variable.assign(2.0)
        with pytest.raises(RuntimeError, match="Mixing different"):
            other.run(lambda: variable.assign_add(2.0))
        for read in (lambda: variable.value, lambda: variable + 1):
            with pytest.raises(RuntimeError, match="Mixing different"):
                other.run(read)
            with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
                read()

    def test_wrong_shape(self, two):
        with pytest.raises(ValueError, match="must match"):
            make(two).assign([1.0, 2.0])


class TestSyncOnRead:
    def make(self, strategy, aggregation, initial=1.0, **options):
        return make(strategy, initial, aggregation=aggregation, synchronization="on_read", **options)

    @pytest.mark.parametrize(("aggregation", "expected"), [("sum", 8), ("mean", 4), ("only_first_replica", 3)])
    def test_reads(self, two, aggregation, expected):
        variable = self.make(two, aggregation)
        two.run(lambda: variable.assign(own_value()))
        assert components(variable) == [3, 5]
        assert float(variable.value) == expected
        assert [float(v) for v in two.run(lambda: variable.value + 0).values] == [3, 5]

    def test_reading_without_aggregation(self, two):
        variable = self.make(two, "none")
        with pytest.raises(ValueError, match="Could not convert from `tf.VariableAggregation`"):
            _ = variable.value
        with pytest.raises(ValueError, match="Could not convert"):
            variable.assign(1.0)

    def test_initial_value_counts_on_each_replica(self, two):
        assert float(self.make(two, "sum").value) == 2

    @pytest.mark.parametrize(
        ("aggregation", "dtype", "value", "parts", "read"),
        [
            ("sum", "float32", 6, [3, 3], 6),
            ("sum", "int32", 6, [3, 3], 6),
            ("sum", "int32", 5, [3, 2], 5),  # the original stores 2 and 2, and loses one
            ("mean", "float32", 6, [6, 6], 6),
            ("only_first_replica", "float32", 6, [6, 6], 6),
        ],
    )
    def test_assign_across_replicas(self, two, aggregation, dtype, value, parts, read):
        variable = self.make(two, aggregation, 0, dtype=dtype)
        variable.assign(value)
        assert components(variable) == parts
        assert float(variable.value) == read

    @pytest.mark.parametrize("value", [0.1, 1e-7, 12345.678, 1 / 3])
    def test_a_sum_reads_what_was_assigned(self, mirrored, value):
        variable = self.make(mirrored, "sum")
        variable.assign(value)
        np.testing.assert_allclose(float(variable.value), np.float32(value), rtol=1e-7)

    @pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
    def test_adding_to_a_sum_across_replicas(self, two, method):
        variable = self.make(two, "sum")
        with pytest.raises(ValueError, match=f"SyncOnReadVariable does not support `{method}`"):
            getattr(variable, method)(1.0)

    def test_adding_to_a_mean_goes_to_every_component(self, two):
        variable = self.make(two, "mean")
        two.run(lambda: variable.assign(own_value()))
        variable.assign_add(6.0)
        assert components(variable) == [9, 11]


class TestCentral:
    @pytest.mark.parametrize(
        ("aggregation", "method", "expected"),
        [
            ("sum", "assign", 8),
            ("sum", "assign_add", 9),
            ("sum", "assign_sub", -7),
            ("mean", "assign", 4),
            ("mean", "assign_add", 5),
            ("mean", "assign_sub", -3),
            ("only_first_replica", "assign", 3),
            ("only_first_replica", "assign_add", 4),
        ],
    )
    def test_in_replicas(self, central, aggregation, method, expected):
        variable = make(central, aggregation=aggregation)
        central.run(lambda: getattr(variable, method)(own_value()))
        assert float(variable.value) == expected
        assert components(variable) == [expected, expected]

    def test_there_is_one_tensor(self, central):
        with central.scope():
            variable = keras.Variable(1.0)
        assert {component.data_ptr() for component in variable.components} == {variable.value.data_ptr()}

    def test_trainable_needs_an_aggregation(self, central):
        with central.scope():
            variable = keras.Variable(1.0)
        with pytest.raises(ValueError, match="You must specify an aggregation method"):
            central.run(lambda: variable.assign(own_value()))

    def test_layer_state_is_each_replicas_own(self, central):
        variable = make(central)
        central.run(lambda: variable.assign(own_value()))
        assert components(variable) == [3, 5]
        assert float(variable.value) == 4
        variable.assign(2.0)
        assert components(variable) == [2, 2]

    def test_gradients_stay_apart(self, central):
        with central.scope():
            variable = keras.Variable(1.0)

        def step():
            (variable * own_value()).backward()
            return variable.value.grad.clone()

        assert [float(v) for v in central.run(step).values] == [3, 5]

    def test_assign_across_replicas_reaches_them(self, central):
        variable = make(central)
        variable.assign(4.0)
        variable.assign_add(1.0)
        assert [float(v) for v in central.experimental_local_results(central.run(lambda: variable.value + 0))] == [5, 5]


def test_seeds_are_streams_of_their_own(two):
    with two.scope():
        generator = keras.random.SeedGenerator(7)
    alone = keras.random.SeedGenerator(7)

    def draw():
        return [keras.random.uniform((3,), seed=generator) for _ in range(2)]

    first, second = two.run(draw)
    assert np.array_equal(first.values[0], keras.random.uniform((3,), seed=alone))  # replica 0 is one device's stream
    assert np.array_equal(second.values[0], keras.random.uniform((3,), seed=alone))
    drawn = [tuple(v.tolist()) for value in (first, second) for v in value.values]
    assert len(set(drawn)) == 4


def test_unseeded_draws_differ_by_replica_and_repeat_by_seed(two):
    def run():
        keras.utils.set_random_seed(3)
        results = [two.run(lambda: (keras.random.normal((2,)), keras.random.normal((2,)))) for _ in range(3)]
        return [tuple(v.tolist()) for pair in results for value in pair for v in value.values]

    first = run()
    assert len(set(first)) == 12
    assert run() == first


class Transposed(keras.layers.Layer):
    """Multiplies by another layer's kernel, as tied embeddings do."""

    def __init__(self, source):
        super().__init__()
        self.source = source

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.source.kernel))


class TestInModels:
    def model(self, strategy, tied):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inputs = keras.Input((4,))
            layer = keras.layers.Dense(4, "tanh")
            x = layer(layer(inputs))  # one layer, used twice
            if tied:
                x = Transposed(layer)(x)  # two layers, one variable
            model = keras.Model(inputs, keras.layers.Dense(1)(x))
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    @pytest.mark.parametrize("tied", [False, True])
    def test_shared_variables_train_as_on_one_device(self, any_strategy, tied):
        x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
        weights = []
        for strategy in (any_strategy, kd.get_strategy()):
            model = self.model(strategy, tied)
            model.fit(x, x.sum(1), batch_size=4, epochs=3, shuffle=False, verbose=0)
            weights.append(model.get_weights())
        for own, expected in zip(*weights, strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)

    def test_switching_trainable_takes_effect_at_the_next_fit(self, any_strategy):
        x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
        histories = []
        for strategy in (any_strategy, kd.get_strategy()):
            model = self.model(strategy, tied=False)
            settings = {"batch_size": 4, "shuffle": False, "verbose": 0}
            model.fit(x, x.sum(1), **settings)
            frozen = model.layers[1].kernel.numpy()
            model.layers[1].trainable = False
            with strategy.scope():
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(x, x.sum(1), **settings)
            assert np.array_equal(model.layers[1].kernel.numpy(), frozen)
            model.layers[1].trainable = True
            with strategy.scope():
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(x, x.sum(1), **settings)
            assert not np.array_equal(model.layers[1].kernel.numpy(), frozen)
            histories.append(model.get_weights())
        for own, expected in zip(*histories, strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)

    def test_parameters_are_the_first_replicas(self, any_strategy):
        model = self.model(any_strategy, tied=False)
        model.fit(np.ones((5, 4)), np.ones((5, 1)), verbose=0)
        parameters = {parameter.data_ptr() for parameter in model.parameters()}
        assert parameters == {variable.raw_value.data_ptr() for variable in model.variables}
        assert all(isinstance(parameter, torch.nn.Parameter) for parameter in model.parameters())

    def test_a_state_dict_holds_what_reading_gives_and_loads_into_all(self, any_strategy):
        def make_model():
            keras.utils.set_random_seed(1)
            with any_strategy.scope():
                model = keras.Sequential(
                    [keras.Input((4,)), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1)]
                )
                model.compile("adam", "mse")
            return model

        model, other = make_model(), make_model()
        x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
        model.fit(x, x.sum(1), batch_size=4, verbose=0)
        state = {name.rpartition("_torch_params.")[2]: value for name, value in model.state_dict().items()}
        for variable in model.variables:
            assert np.array_equal(state[variable.path].numpy(), variable.numpy())
        renamed = zip(other.variables, model.variables, strict=True)
        other.load_state_dict({f"_torch_params.{o.path}": state[m.path] for o, m in renamed}, strict=False)
        for own, expected in zip(other.variables, model.variables, strict=True):
            for component in own.components:
                assert np.array_equal(component.detach().numpy(), expected.numpy())
        assert model.state_dict(keep_vars=True).keys() == model.state_dict().keys()

    def test_a_failed_load_leaves_replicas_equal(self, two):
        model = self.model(two, tied=False)
        wrong = {name: torch.zeros(7) for name in model.state_dict()}
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(wrong)
        assert all(torch.equal(*variable.components) for variable in model.variables)

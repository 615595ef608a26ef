"""Files, copies and state of models under strategies are those of models without one."""

import contextlib
import copy
import functools
import gc
import io
import json
import pickle
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest
import torch
from keras import layers
from strategies import ALL, DISTRIBUTED, close, made, replicas_agree, scope_of, state_of, strategy_named

ROWS = 13
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 6)).astype("float32")
Y = X.sum(1, keepdims=True)
WORDS = RNG.integers(0, 9, size=(ROWS, 5))
FIT = {"batch_size": 6, "shuffle": False, "verbose": 0}


@keras.saving.register_keras_serializable("test_saving")
class Noisy(layers.Layer):
    """A weight, a counter that each step writes, and a seed generator."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(5)

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1.0)
            x = x + keras.random.normal(x.shape, stddev=0.1, seed=self.seeds)
        return x * self.scale


@keras.saving.register_keras_serializable("test_saving")
class Subclassed(keras.Model):
    """Layers of one's own, and a metric that belongs to the model."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.noisy, self.out = layers.Dense(4, "relu"), Noisy(), layers.Dense(1)
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x, training=False):
        return self.out(self.noisy(self.hidden(x), training=training))

    def train_step(self, data):
        logs = super().train_step(data)
        self.seen.update_state(keras.ops.ones_like(data[1]))
        return {**logs, "seen": self.seen.result()}


def sequential():
    norm, dropout = layers.BatchNormalization(), layers.Dropout(0.3, seed=3)
    return keras.Sequential([layers.Input((6,)), layers.Dense(5, "relu"), norm, dropout, layers.Dense(1)])


def functional():
    words = keras.Input((5,), dtype="int64")
    hidden = layers.LSTM(3)(layers.Embedding(9, 4)(words))
    return keras.Model(words, layers.Dense(1)(hidden))


def with_torch_module():
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    wrapper = layers.TorchModuleWrapper(module, output_shape=(None, 4))
    return keras.Sequential([layers.Input((6,)), wrapper, layers.Dense(1)])


def dense():
    norm = layers.BatchNormalization(synchronized=True)
    return keras.Sequential([layers.Input((6,)), layers.Dense(4, "tanh"), norm, layers.Dense(1)])


def adam(**options):
    return keras.optimizers.Adam(0.01, **options)


def scaled(**options):
    inner = keras.optimizers.SGD(0.01, momentum=0.9, **options)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2)


CASES = {
    "sequential": (sequential, adam),
    "functional": (functional, lambda: keras.optimizers.RMSprop(0.01)),
    "subclassed": (Subclassed, adam),
    "torch module": (with_torch_module, adam),
    "moving average": (dense, lambda: adam(use_ema=True, ema_overwrite_frequency=2)),
    "loss scale": (dense, scaled),
    "accumulation": (dense, lambda: adam(gradient_accumulation_steps=2)),
    "scaled accumulation": (dense, lambda: scaled(gradient_accumulation_steps=2)),
}


MATRIX = tuple(name for name in ALL if name != "mirrored1")
FEW = ("one", "mirrored3", "central2")
EXACT = "accumulation"  # synchronized batch norm: the same numbers on any number of replicas


def building(case):
    build, optimizer = CASES[case]

    def compiled():
        model = build()
        model.compile(optimizer(), "mse", metrics=["mae"])
        return model

    return compiled


def data(case):
    # Two rows for each of three replicas, last: a torch batch norm needs them, and statistics end up apart.
    rows = slice(0, 12) if case in ("sequential", "torch module") else slice(None)
    return (WORDS if case == "functional" else X)[rows], Y[rows]


def fitted(strategy, case, epochs=1):
    model = made(strategy, building(case))
    model.fit(*data(case), epochs=epochs, **FIT)
    return model


@functools.cache
def plain_model(case):
    return fitted(None, case)


def twin(model, case):
    """The same model of no strategy, with every variable set to the other's value."""
    plain = plain_model(case)
    wrapped = [layer.module for layer in model.layers if isinstance(layer, layers.TorchModuleWrapper)]
    own = [layer.module for layer in plain.layers if isinstance(layer, layers.TorchModuleWrapper)]
    for module, its in zip(own, wrapped, strict=True):
        for buffer, value in zip(module.buffers(), its.buffers(), strict=True):
            buffer.copy_(value)
    pairs = [(plain.variables, model.variables), (plain.optimizer.variables, model.optimizer.variables)]
    for variables, its in pairs:
        for variable, value in zip(variables, its, strict=True):
            assert variable.path == value.path
            variable.assign(value.numpy())
    return plain


def without_ids(config):
    """A config without the addresses of objects in it."""
    if isinstance(config, dict):
        return {key: without_ids(value) for key, value in config.items() if key != "shared_object_id"}
    return [without_ids(value) for value in config] if isinstance(config, list) else config


def h5_content(file):
    """Every dataset's dtype, shape and bytes, and every attribute, by path."""
    content = {}

    def visit(name, item):
        content[name] = {key: str(value) for key, value in item.attrs.items()}
        if isinstance(item, h5py.Dataset):
            content[name] |= {"is": (str(item.dtype), item.shape, item[()].tobytes())}

    with h5py.File(file, "r") as opened:
        opened.visititems(visit)
    return content


def keras_content(path):
    with zipfile.ZipFile(path) as archive:
        content = h5_content(io.BytesIO(archive.read("model.weights.h5")))
        content["config"] = without_ids(json.loads(archive.read("config.json")))
        assert set(archive.namelist()) == {"model.weights.h5", "config.json", "metadata.json"}
    return content


def exported(model, path, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing's own, on plain Keras too
        model.export(path, format=kind, verbose=False)
    return path


@pytest.fixture(scope="module", autouse=True)
def imported_by_keras(tmp_path_factory):
    """Saves once: what Keras imports for it sets environment variables, and makes each test's `gc.collect` slow."""
    fitted(None, "sequential").save(tmp_path_factory.mktemp("first") / "model.keras")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class TestBytes:
    """What files hold is what the same model holds that never was under a strategy."""

    @pytest.mark.parametrize(
        ("name", "case"),
        [(name, case) for name in DISTRIBUTED for case in CASES if name in FEW[1:] or case in ("sequential", EXACT)],
    )
    def test_keras_and_weights_files(self, name, case, tmp_path):
        model = fitted(strategy_named(name), case)
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
        plain = twin(model, case)
        plain.save(tmp_path / "plain.keras")
        plain.save_weights(tmp_path / "plain.weights.h5")
        content = keras_content(tmp_path / "model.keras")
        if case != "torch module":  # its pickled module is in the config, with addresses of its own
            assert content["config"] == keras_content(tmp_path / "plain.keras")["config"]
        content.pop("config")
        assert len([key for key in content if key.startswith("optimizer/vars/")]) > 2
        expected = keras_content(tmp_path / "plain.keras")
        expected.pop("config")
        assert content == expected
        assert h5_content(tmp_path / "model.weights.h5") == h5_content(tmp_path / "plain.weights.h5")

    def test_state_that_every_replica_counts_is_counted_once(self, tmp_path):
        model = fitted(strategy_named("mirrored3"), "subclassed")
        model.save(tmp_path / "model.keras")
        dtype, shape, held = keras_content(tmp_path / "model.keras")["layers/noisy/vars/1"]["is"]
        assert (dtype, shape, np.frombuffer(held, dtype)) == ("float32", (), 3.0)  # a ragged last batch included

    @pytest.mark.parametrize(
        ("name", "case"),
        [(name, case) for name in FEW for case in ("sequential", "subclassed")] + [("mirrored3", "functional")],
    )
    def test_exported_for_torch(self, name, case, tmp_path):
        model = fitted(strategy_named(name), case)
        plain = twin(model, case)
        files = [exported(m, tmp_path / f"{index}.pt2", "torch") for index, m in enumerate((model, plain))]
        own, its = (torch.export.load(file) for file in reversed(files))
        assert list(its.state_dict) == list(own.state_dict)
        for key, value in own.state_dict.items():
            assert its.state_dict[key].dtype == value.dtype
            assert torch.equal(its.state_dict[key], value), key
        assert len(its.constants) == len(own.constants)
        x = torch.tensor(data(case)[0])
        x = x[:1]  # Keras exports for one row
        assert torch.equal(its.module()(x), own.module()(x))
        close([its.module()(x).detach().numpy()], [model.predict(x, verbose=0)])

    @pytest.mark.parametrize("name", FEW)
    @pytest.mark.parametrize("case", ["sequential", "functional", "subclassed"])
    def test_exported_for_onnx(self, name, case, tmp_path, capfd):
        onnx = pytest.importorskip("onnx")
        pytest.importorskip("onnxscript")
        model = fitted(strategy_named(name), case)
        plain = twin(model, case)
        held = []
        for index, one in enumerate((model, plain)):
            graph = onnx.load(exported(one, tmp_path / f"{index}.onnx", "onnx")).graph
            nodes = [(node.op_type, len(node.input)) for node in graph.node]
            constants = [
                (i.name, i.data_type, tuple(i.dims), onnx.numpy_helper.to_array(i).tobytes()) for i in graph.initializer
            ]
            held.append((nodes, sorted(constants)))
        assert held[0] == held[1]
        assert held[0][1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of a model after one epoch, in the middle of an accumulation, by strategy; and two epochs' end without."""
    folder = tmp_path_factory.mktemp("saved")
    for name in MATRIX:
        model = fitted(strategy_named(name), EXACT)
        assert model.optimizer.iterations.numpy() == 1  # of three batches
        model.save(folder / f"{name}.keras")
        model.save_weights(folder / f"{name}.weights.h5")
    model = fitted(None, EXACT)
    model.fit(*data(EXACT), **FIT)
    return folder, state_of(model), model.evaluate(*data(EXACT), verbose=0)


@pytest.mark.parametrize("loaded_under", MATRIX)
@pytest.mark.parametrize("saved_under", MATRIX)
class TestAnyStrategyReadsAnyOthersFiles:
    def test_load_model_goes_on_as_if_never_interrupted(self, saved, saved_under, loaded_under):
        folder, state, evaluated = saved
        strategy = strategy_named(loaded_under)
        keras.backend.clear_session(free_memory=False)
        with scope_of(strategy):
            model = keras.models.load_model(folder / f"{saved_under}.keras")
        assert model._distribute_strategy is strategy
        assert model.optimizer.built
        model.fit(*data(EXACT), **FIT)
        close(state_of(model), state)
        close([model.evaluate(*data(EXACT), verbose=0)], [evaluated])
        assert replicas_agree(model)

    def test_load_weights_goes_on_as_if_never_interrupted(self, saved, saved_under, loaded_under):
        folder, state, evaluated = saved
        model = made(strategy_named(loaded_under), building(EXACT), seed=2)
        model.optimizer.build(model.trainable_variables)
        model.load_weights(folder / f"{saved_under}.weights.h5")
        model.fit(*data(EXACT), **FIT)
        close(state_of(model), state)
        close([model.evaluate(*data(EXACT), verbose=0)], [evaluated])
        assert replicas_agree(model)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["mirrored3", "central2"])
def test_a_loaded_model_is_the_saved_one(name, case, tmp_path):
    """Save and load at once, then both go on under the same strategy, dropout included."""
    strategy = strategy_named(name)
    model = fitted(strategy, case)
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=False)
    assert loaded.distribute_strategy is strategy
    for own, its in zip(state_of(model), state_of(loaded), strict=True):
        np.testing.assert_array_equal(its, own)
    if case not in ("sequential", "torch module"):  # statistics are each replica's own, a file holds their mean
        for own, its in zip(model.variables, loaded.variables, strict=True):
            if "seed_generator" in own.path:
                its.assign(own.numpy())
        for one in (model, loaded):
            keras.utils.set_random_seed(3)
            one.fit(*data(case), epochs=2, **FIT)
        close(state_of(loaded), state_of(model))
    close([loaded.predict(data(case)[0], verbose=0)], [model.predict(data(case)[0], verbose=0)])


class TestCopies:
    @pytest.mark.parametrize("name", FEW)
    @pytest.mark.parametrize("case", ["sequential", "functional", "subclassed"])
    def test_clone_model(self, name, case):
        strategy = strategy_named(name)
        model = fitted(strategy, case)
        with strategy.scope():
            clone = keras.models.clone_model(model)
        assert clone.distribute_strategy is strategy
        x, y = data(case)
        if case == "subclassed":
            clone(x[:2])
        clone.set_weights(model.get_weights())
        clone.compile("sgd", "mse")
        close([clone.predict(x, verbose=0)], [model.predict(x, verbose=0)])
        before = model.get_weights()
        clone.fit(x, y, **FIT)
        close(model.get_weights(), before, atol=0, rtol=0)
        assert all(variable.strategy is strategy for variable in clone.variables)

    @pytest.mark.parametrize("name", FEW)
    def test_load_without_compile(self, name, tmp_path):
        strategy = strategy_named(name)
        model = fitted(strategy, "sequential")
        model.save(tmp_path / "model.keras")
        with strategy.scope():
            loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
        assert not loaded.compiled
        close([loaded.predict(X, verbose=0)], [model.predict(X, verbose=0)])
        loaded.compile("sgd", "mse")  # outside of the scope it was made in
        loaded.fit(X, Y, **FIT)
        assert all(variable.strategy is strategy for variable in loaded.optimizer.variables)

    @pytest.mark.parametrize("name", FEW)
    def test_from_config(self, name):
        strategy = strategy_named(name)
        model = fitted(strategy, "functional")
        with strategy.scope():
            other = keras.Model.from_config(model.get_config())
            other.compile_from_config(model.get_compile_config())
        assert without_ids(other.get_config()) == without_ids(model.get_config())
        assert all(variable.strategy is strategy for variable in other.variables)
        other.fit(*data("functional"), **FIT)
        assert replicas_agree(other)

    @pytest.mark.parametrize("inside", [True, False])
    @pytest.mark.parametrize("name", ["none", *FEW])
    def test_deepcopy_is_of_the_models_strategy(self, name, inside):
        strategy = strategy_named(name)
        model = fitted(strategy, EXACT)
        with scope_of(strategy) if inside else contextlib.nullcontext():
            other = copy.deepcopy(model)
        assert other._distribute_strategy is strategy
        for variable in (*other.variables, *other.optimizer.variables):
            assert getattr(variable, "strategy", None) is strategy
        close(state_of(other), state_of(model), atol=0, rtol=0)
        before = state_of(model)
        other.fit(*data(EXACT), **FIT)
        close(state_of(model), before, atol=0, rtol=0)
        model.fit(*data(EXACT), **FIT)
        close(state_of(other), state_of(model))

    def test_deepcopy_of_a_container_of_models_copies_each_once(self):
        strategy = strategy_named("mirrored2")
        model = fitted(strategy, EXACT)
        first, second = copy.deepcopy([model, model])
        assert first is second
        assert first is not model
        assert first._distribute_strategy is strategy

    @pytest.mark.parametrize("case", ["sequential", "subclassed", "torch module", "scaled accumulation"])
    @pytest.mark.parametrize("name", FEW[1:])
    def test_a_pickled_model_is_of_the_scope_that_it_is_unpickled_in(self, name, case):
        strategy = strategy_named(name)
        model = fitted(strategy, case)
        pickled = pickle.dumps(model)
        state = state_of(model)
        plain = pickle.loads(pickled)  # noqa: S301 - dumped above
        assert plain._distribute_strategy is None
        close(state_of(plain), state, atol=0, rtol=0)
        other = strategy_named("mirrored3" if name == "mirrored2" else "mirrored2")
        with other.scope():
            under_another = pickle.loads(pickled)  # noqa: S301
        assert under_another._distribute_strategy is other
        close(state_of(under_another), state, atol=0, rtol=0)
        for one in (plain, under_another):
            one.fit(*data(case), **FIT)
        assert replicas_agree(under_another)


class TestWeights:
    @pytest.mark.parametrize("name", FEW)
    @pytest.mark.parametrize("case", ["sequential", "accumulation", "scaled accumulation"])
    def test_set_weights_and_optimizer_variables_reach_every_replica(self, name, case):
        strategy = strategy_named(name)
        model, other = fitted(strategy, case), made(strategy, building(case), seed=7)
        other.fit(*data(case), epochs=2, **FIT)
        other.set_weights(model.get_weights())
        for variable, its in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
            variable.assign(its.numpy())
        close(state_of(other), state_of(model), atol=0, rtol=0)
        assert replicas_agree(other)
        close([other.predict(X, verbose=0)], [model.predict(X, verbose=0)], atol=0, rtol=0)
        if case != "sequential":
            model.fit(*data(case), **FIT)
            other.fit(*data(case), **FIT)
            close(state_of(other), state_of(model))

    @pytest.mark.parametrize("name", FEW)
    def test_optimizer_own_variables_save_and_load(self, name):
        strategy = strategy_named(name)
        model = fitted(strategy, "scaled accumulation")
        store = {}
        model.optimizer.save_own_variables(store)
        plain = fitted(None, "scaled accumulation", epochs=2)
        plain.optimizer.load_own_variables(store)
        close([v.numpy() for v in plain.optimizer.variables], [v.numpy() for v in model.optimizer.variables])

    @pytest.mark.parametrize("name", FEW)
    def test_weights_of_another_shape_leave_everything_as_it_was(self, name, tmp_path):
        model = fitted(strategy_named(name), "sequential")
        wide = keras.Sequential([layers.Input((6,)), layers.Dense(9), layers.BatchNormalization(), layers.Dense(1)])
        wide.save_weights(tmp_path / "wide.weights.h5")
        components = [[part.detach().clone() for part in v.components] for v in model.variables]
        state = state_of(model)
        weights = model.get_weights()
        weights[0] = weights[0][:, :-1]
        with pytest.raises(ValueError, match="shape"):
            model.set_weights(weights)
        with pytest.raises(ValueError, match=r"Layer 'dense' expected|shape|A total of"):
            model.load_weights(tmp_path / "wide.weights.h5")
        close(state_of(model), state, atol=0, rtol=0)
        for variable, parts in zip(model.variables, components, strict=True):
            assert all(torch.equal(own, its) for own, its in zip(variable.components, parts, strict=True))
        model.fit(X, Y, **FIT)
        assert replicas_agree(model)

    @pytest.mark.parametrize("where", ["missing", "closed", "a file"])
    def test_a_place_that_cannot_be_written_leaves_the_strategy_usable(self, where, tmp_path):
        model, reference = fitted(strategy_named("mirrored3"), EXACT), fitted(None, EXACT)
        folder = tmp_path / "missing"
        if where == "closed":
            folder = tmp_path / "closed.keras"  # a folder in the place of the file
            folder.mkdir()
        elif where == "a file":
            folder.write_text("")
        path = folder if where == "closed" else folder / "model.keras"
        for save in (lambda: model.save(path), lambda: model.save_weights(folder / "deep" / "model.weights.h5")):
            if where == "missing":
                with contextlib.suppress(OSError):  # Keras makes some of the folders
                    save()
            else:
                with pytest.raises((OSError, ValueError)):
                    save()
        for one in (model, reference):
            one.fit(*data(EXACT), **FIT)
        close(state_of(model), state_of(reference))


class TestTorchState:
    """What `torch.nn.Module`'s own methods give and take, on the first replica's device."""

    @pytest.mark.parametrize("name", FEW)
    @pytest.mark.parametrize("case", ["sequential", "subclassed", "torch module", EXACT])
    def test_state_dict_holds_the_values_that_reading_gives(self, name, case):
        model = fitted(strategy_named(name), case)
        plain = twin(model, case)
        own, its = plain.state_dict(), model.state_dict()
        assert list(its) == list(own)
        for key, value in own.items():
            assert torch.equal(its[key], value), key

    @pytest.mark.parametrize("name", FEW)
    @pytest.mark.parametrize("case", ["sequential", "subclassed", "accumulation"])
    def test_load_state_dict_reaches_every_replica(self, name, case, tmp_path):
        model = fitted(None, case)
        torch.save(model.state_dict(), tmp_path / "state.pt")
        other = made(strategy_named(name), building(case), seed=9)
        other.fit(*data(case), **FIT)
        keys = other.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert not keys.missing_keys
        assert not keys.unexpected_keys
        close(other.get_weights(), model.get_weights(), atol=0, rtol=0)
        for variable in other.variables:
            values = [part.detach().numpy() for part in variable.components]
            if variable.aggregation == "none" and variable.synchronization != "on_read":
                close(values, [variable.numpy()] * len(values), atol=0, rtol=0)
        close([other.predict(data(case)[0], verbose=0)], [model.predict(data(case)[0], verbose=0)])

    def test_a_state_dict_of_another_shape_leaves_components_equal(self):
        model = fitted(strategy_named("mirrored3"), EXACT)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        key = next(key for key in state if key.endswith("kernel"))
        state[key] = state[key][:, :-1]
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(state)
        assert replicas_agree(model)
        model.fit(*data(EXACT), **FIT)

    @pytest.mark.parametrize("name", FEW)
    def test_parameters_are_the_first_replicas(self, name):
        strategy = strategy_named(name)
        model = fitted(strategy, "sequential")
        parameters = {id(parameter) for parameter in model.parameters()}
        primary = {id(variable._value) for variable in model.variables}
        assert parameters == primary
        if not name.startswith("central"):
            assert {id(variable.components[0]) for variable in model.variables} == parameters
        assert len(list(model.parameters())) == len(list(fitted(None, "sequential").parameters()))

    @pytest.mark.parametrize("name", FEW)
    def test_a_model_of_a_trained_models_layers_has_their_parameters(self, name):
        strategy = strategy_named(name)
        model = fitted(strategy, "sequential")
        with strategy.scope():
            other = keras.Sequential([layers.Input((6,)), *model.layers[:-1], layers.Dense(2)])
        tensors = {id(variable._value) for variable in other.variables}
        assert {id(parameter) for parameter in other.parameters()} == tensors
        kept = {id(variable._value) for layer in model.layers[:-1] for variable in layer.variables}
        assert kept < tensors
        assert sum(parameter.requires_grad for parameter in set(other.parameters())) == 6
        other.compile("sgd", "mse")
        other.fit(X, np.repeat(Y, 2, 1), **FIT)
        assert replicas_agree(other)

    @pytest.mark.parametrize("name", FEW)
    def test_a_variable_without_a_name_is_named_as_keras_names_it(self, name):
        names = []
        for strategy in (None, strategy_named(name)):
            names.append(made(strategy, lambda: [keras.Variable(1.0).name, keras.Variable(1, trainable=False).name]))
        assert names[0] == names[1] == ["variable", "variable_1"]


class SavingInBatch(keras.callbacks.Callback):
    """Saves after one batch, and keeps what the model held then."""

    def __init__(self, path, step):
        super().__init__()
        self.path, self.step, self.state, self.seen = path, step, None, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.step:
            self.model.save(self.path)
            self.state = state_of(self.model)


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("case", ["accumulation", "moving average", "scaled accumulation", "sequential"])
def test_saving_within_an_epoch_changes_nothing(case, step, tmp_path):
    strategy = strategy_named("mirrored3")
    model, other = made(strategy, building(case)), made(strategy, building(case))
    saving = SavingInBatch(tmp_path / "model.keras", step)
    keras.utils.set_random_seed(2)
    model.fit(*data(case), epochs=2, callbacks=[saving], **FIT)
    keras.utils.set_random_seed(2)
    other.fit(*data(case), epochs=2, **FIT)
    close(state_of(model), state_of(other), atol=0, rtol=0)
    loaded = keras.models.load_model(saving.path)
    close(state_of(loaded), saving.state, atol=0, rtol=0)

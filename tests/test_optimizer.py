"""Optimizers inside `run`: gradients are summed once, then applied on every replica."""

import keras
import numpy as np
import pytest
import torch

import keras_distrib as kd

OPTIMIZERS = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "Lion",
    "LossScaleOptimizer",
    "MultiOptimizer",
    "Muon",
    "Nadam",
    "RMSprop",
    "SGD",
    "ScheduleFreeAdamW",
]


def make_optimizer(name):
    if name == "LossScaleOptimizer":
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=8.0)
    if name == "MultiOptimizer":
        return keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.Adam(0.01))
    return getattr(keras.optimizers, name)(learning_rate=0.01)


def replica_id():
    return kd.get_replica_context().replica_id_in_sync_group


def test_every_builtin_optimizer_is_listed():
    found = {
        name
        for name, cls in vars(keras.optimizers).items()
        if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer) and name != "Optimizer"
    }
    assert found <= set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy_class", [kd.MirroredStrategy, kd.experimental.CentralStorageStrategy])
def test_two_updates_in_one_step_like_a_gan(name, strategy_class):
    """Two optimizers, one after the other, against one device with summed gradients."""
    rng = np.random.default_rng(0)
    starts = [rng.normal(size=(4, 3)).astype("float32"), rng.normal(size=(3,)).astype("float32")]
    pulls = [torch.tensor(rng.normal(size=(4, 3)), dtype=torch.float32) for _ in range(3)]

    def build():
        first, second = keras.Variable(starts[0]), keras.Variable(starts[1])
        return first, second, make_optimizer(name), make_optimizer(name)

    def update(first, second, one, two, pull):
        for _ in range(2):
            loss = one.scale_loss(((first * pull) @ torch.ones(3) * 0.5).pow(2).sum() + (second * 1.0).sum())
            one.apply([torch.autograd.grad(loss, first.value)[0]], [first])
            loss = two.scale_loss((second * first.value.detach().sum(0) * pull.sum()).pow(2).sum())
            two.apply([torch.autograd.grad(loss, second.value)[0]], [second])

    alone = build()

    class Summed:
        """One device: the sum of the replicas' gradients, by one update."""

        @staticmethod
        def update(first, second, one, two):
            for _ in range(2):
                losses = [
                    one.scale_loss(((first * p) @ torch.ones(3) * 0.5).pow(2).sum() + (second * 1.0).sum())
                    for p in pulls
                ]
                gradient = torch.autograd.grad(sum(losses), first.value)[0]
                with torch.no_grad():
                    one.apply([gradient], [first])
                losses = [two.scale_loss((second * first.value.detach().sum(0) * p.sum()).pow(2).sum()) for p in pulls]
                gradient = torch.autograd.grad(sum(losses), second.value)[0]
                with torch.no_grad():
                    two.apply([gradient], [second])

    strategy = strategy_class([f"cpu:{i}" for i in range(3)])
    with strategy.scope():
        made = build()
    for _ in range(3):
        Summed.update(*alone)
        strategy.run(lambda: update(*made, pulls[replica_id()]))
    for own, variable in zip(alone[:2], made[:2], strict=True):
        for component in variable.components:
            np.testing.assert_allclose(component.detach(), own.value.detach(), rtol=2e-5, atol=2e-6)
    for own, other in zip(alone[2:], made[2:], strict=True):
        assert int(own.iterations) == int(other.iterations) == 6
        for mine, its in zip(own.variables, other.variables, strict=True):
            np.testing.assert_allclose(its.value.detach(), mine.value.detach(), rtol=1e-4, atol=1e-5)


def test_gradients_are_summed(any_strategy):
    """Golden value: gradients 1 and 2, rate 1, on 1.0: -2 (one device: 0)."""
    with any_strategy.scope():
        variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD(1.0)
    any_strategy.run(lambda: optimizer.apply_gradients([(torch.tensor(1.0 + replica_id()), variable)]))
    expected = 0.0 if any_strategy.num_replicas_in_sync == 1 else -2.0
    assert [float(c.detach()) for c in variable.components] == [expected] * any_strategy.num_replicas_in_sync
    assert int(optimizer.iterations) == 1


def test_a_gradient_of_one_replica_alone(two):
    with two.scope():
        variables = [keras.Variable(1.0), keras.Variable(1.0)]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)

    def step():
        one = torch.tensor(1.0) if replica_id() == 1 else None
        optimizer.apply([one, torch.tensor(2.0)], variables)

    two.run(step)
    assert [float(v.value.detach()) for v in variables] == [0, -3]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_gradient_of_no_replica(two):
    with two.scope():
        variables = [keras.Variable(1.0), keras.Variable(1.0)]
        optimizer = keras.optimizers.SGD(1.0)
    two.run(lambda: optimizer.apply([None, torch.tensor(2.0)], variables))
    assert [float(v.value.detach()) for v in variables] == [1, -3]


@pytest.mark.parametrize("strategy_class", [kd.MirroredStrategy, kd.experimental.CentralStorageStrategy])
def test_replicas_without_rows_get_the_update_too(strategy_class):
    strategy = strategy_class(["cpu:0", "cpu:1", "cpu:2"])
    with strategy.scope():
        variable, optimizer = keras.Variable([1.0, 2.0]), keras.optimizers.Adam(0.1)
    dataset = strategy.experimental_distribute_dataset([torch.ones(n, 2) for n in (4, 3, 1)])

    def step(x):
        loss = (variable * x).sum()
        optimizer.apply(torch.autograd.grad(loss, [variable.value]), [variable])

    for batch in dataset:
        strategy.run(step, args=(batch,))
    for v in (variable, *optimizer.variables):
        assert all(torch.equal(v.components[0], component) for component in v.components)
    assert int(optimizer.iterations) == 3


def test_users_optimizer_with_its_own_apply(two):
    class Halving(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            return super().apply([grad / 2 for grad in grads], trainable_variables)

    with two.scope():
        variable, optimizer = keras.Variable(1.0), Halving(1.0)
    two.run(lambda: optimizer.apply([torch.tensor(1.0 + replica_id())], [variable]))
    assert [float(c.detach()) for c in variable.components] == [-0.5, -0.5]


def test_not_across_replicas(two):
    with two.scope():
        variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD(1.0)
        with pytest.raises(RuntimeError, match="cannot be called in cross-replica context"):
            optimizer.apply([torch.tensor(1.0)], [variable])
    with pytest.raises(RuntimeError, match="cannot be called in cross-replica context"):
        optimizer.apply([torch.tensor(1.0)], [variable])


def test_variables_or_optimizer_of_elsewhere(two):
    with two.scope():
        variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD(1.0)
    plain, plain_optimizer = keras.Variable(1.0), keras.optimizers.SGD(1.0)
    for o, v in ((optimizer, plain), (plain_optimizer, variable)):
        with pytest.raises(ValueError, match="was not created in the distribution strategy scope of <Mirrored"):
            two.run(lambda o=o, v=v: o.apply([torch.tensor(1.0)], [v]))


def test_the_torch_way_keeps_gradients_apart(two):
    with two.scope():
        variable = keras.Variable(2.0)
        optimizer = keras.optimizers.SGD(1.0)

    def step():
        loss = variable * (1.0 + replica_id())
        loss.backward()
        own = variable.value.grad.clone()
        optimizer.apply([variable.value.grad], [variable])
        variable.value.grad = None
        return own

    assert [float(v) for v in two.run(step).values] == [1, 2]
    assert [float(c.detach()) for c in variable.components] == [-1, -1]


def test_plain_optimizers_are_untouched():
    variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD(1.0)
    optimizer.apply([torch.tensor(3.0)], [variable])
    assert variable.numpy() == -2

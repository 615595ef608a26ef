"""`GradientTape` inside and outside of replicas."""

import keras
import pytest
import torch

import keras_distrib as kd


def test_gradient_structure_and_unconnected():
    a, b, c = keras.Variable(2.0), keras.Variable(3.0), keras.Variable(1.0, trainable=False)
    with kd.GradientTape() as tape:
        loss = a * a
    gradients = tape.gradient(loss, {"a": a, "rest": [b, c]})
    assert gradients == {"a": torch.tensor(4.0), "rest": [None, None]}


def test_unconnected_zero():
    a, b = keras.Variable(2.0), keras.Variable([3.0, 4.0])
    with kd.GradientTape() as tape:
        loss = a * a
    assert tape.gradient(loss, [b], unconnected_gradients="zero")[0].tolist() == [0, 0]


def test_once_unless_persistent():
    a = keras.Variable(2.0)
    with kd.GradientTape() as tape:
        loss = a * a
    tape.gradient(loss, a)
    with pytest.raises(RuntimeError, match="A non-persistent GradientTape can only be used"):
        tape.gradient(loss, a)
    with kd.GradientTape(persistent=True) as tape:
        loss = a * a
    assert tape.gradient(loss, a) == tape.gradient(loss, a) == 4


def test_watch_and_output_gradients():
    x = torch.tensor([1.0, 2.0])
    with kd.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    assert tape.gradient(y, x, output_gradients=torch.tensor([1.0, 10.0])).tolist() == [2, 40]


def test_records_where_gradients_were_off():
    a = keras.Variable(2.0)
    with torch.no_grad(), kd.GradientTape() as tape:
        loss = a * 3
    assert tape.gradient(loss, a) == 3
    assert torch.is_grad_enabled()


def test_bad_input():
    with pytest.raises(ValueError, match="watch_accessed_variables=False"):
        kd.GradientTape(watch_accessed_variables=False)
    with pytest.raises(ValueError, match="Received: unconnected_gradients='no'"):
        kd.GradientTape().gradient(torch.ones(()), [], unconnected_gradients="no")
    with pytest.raises(TypeError, match="Received: 'abc'"):
        kd.GradientTape().gradient(torch.ones(()), "abc")


def test_each_replica_differentiates_its_own(any_strategy):
    with any_strategy.scope():
        variable = keras.Variable(2.0)

    def step():
        with kd.GradientTape() as tape:
            loss = variable * (1.0 + kd.get_replica_context().replica_id_in_sync_group)
        return tape.gradient(loss, [variable, variable])

    first, second = any_strategy.run(step)
    expected = list(range(1, any_strategy.num_replicas_in_sync + 1))
    assert [float(v) for v in any_strategy.experimental_local_results(first)] == expected
    assert [float(v) for v in any_strategy.experimental_local_results(second)] == expected


def test_nothing_accumulates(two):
    with two.scope():
        variable = keras.Variable(2.0)

    def step():
        with kd.GradientTape() as tape:
            loss = variable * 3.0
        return tape.gradient(loss, variable)

    for _ in range(3):
        assert [float(v) for v in two.run(step).values] == [3, 3]
    assert all(component.grad is None for component in variable.components)

"""Strategies by name, for tests that compare them with one another and with none."""

import contextlib

import keras
import numpy as np

import keras_distrib as kd

DISTRIBUTED = ("one", "mirrored1", "mirrored2", "mirrored3", "central2")
ALL = ("none", *DISTRIBUTED)


def strategy_named(name):
    """A strategy on logical CPUs by its kind and number of replicas; None for `none`."""
    if name == "none":
        return None
    if name == "one":
        return kd.OneDeviceStrategy("cpu:0")
    kind = kd.MirroredStrategy if name.startswith("mirrored") else kd.experimental.CentralStorageStrategy
    return kind([f"cpu:{index}" for index in range(int(name[-1]))])


def scope_of(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def made(strategy, build, seed=1):
    """What `build` returns in the strategy's scope, from the same random numbers and names each time."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    with scope_of(strategy):
        return build()


def close(its, own, rtol=1e-5, atol=2e-6):
    """Asserts that two lists of arrays are equal up to the noise of sums in another order."""
    for one, other in zip(its, own, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def state_of(model):
    """A copy of what training changes and files keep: weights, and the optimizer's variables.

    Keras keeps no seed generators' state in files.
    """
    kept = [variable for variable in model.variables if "seed_generator" not in variable.path]
    return [variable.numpy().copy() for variable in (*kept, *model.optimizer.variables)]


def replicas_agree(model):
    """Whether each trainable variable's components are equal, to the bit."""
    return all(
        np.array_equal(part.detach().numpy(), variable.components[0].detach().numpy())
        for variable in model.trainable_variables
        for part in getattr(variable, "components", ())
    )

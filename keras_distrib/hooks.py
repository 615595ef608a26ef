"""What the package does in Keras' places: the hooks that `keras_seam` puts in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from keras_distrib import context, keras_seam
from keras_distrib.replicas.random_streams import fold_replica_into
from keras_distrib.replicas.state import ReplicaState, current_state
from keras_distrib.replicas.torch_modules import call_in_graph, module_of
from keras_distrib.training import inputs, losses, normalization, optimizer
from keras_distrib.training.trainer import DistributedTrainer, compile_model, synchronize
from keras_distrib.variables import DistributedVariable, new_variable


def install() -> None:
    """Puts the hooks into Keras, once."""
    keras_seam.install(
        keras_seam.Hooks(
            new_variable=new_variable,
            trainer=DistributedTrainer,
            compile=compile_model,
            apply=optimizer.apply,
            maybe_build=_maybe_build,
            reduce_loss=losses.reduce_weighted_values,
            loss_call=losses.call_loss,
            scalar_weight=_scalar_weight,
            moments=normalization.moments,
            call_torch_module=_call_torch_module,
            layer_attributes=_layer_attributes,
            keep_attribute=_keep_attribute,
            dropout_generator=_dropout_generator,
            layer_losses=_layer_losses,
            fold_seed=fold_replica_into,
            captured_cond=_captured_cond,
            captured_generator=_captured_generator,
            is_being_built=_is_being_built,
            in_replica=_in_replica,
            state_dict=_state_dict,
            loading_state=_loading_state,
            outside_strategies=_outside_strategies,
            synchronize=_synchronize,
            adapt_data=inputs.adapted,
            scope_of=_scope_of,
            scope_of_model=_scope_of_model,
        )
    )


def _scalar_weight() -> float | None:
    state = current_state()
    return state.share if state is not None and state.averages_gradients and state.num_active > 1 else None


def _call_torch_module(
    wrapper: Any, original: Callable[[], Any], args: tuple[Any, ...], training: Any, kwargs: dict[str, Any]
) -> Any:
    state = current_state()
    if state is not None and state.trace is not None:
        return call_in_graph(wrapper, state, args, training, kwargs)
    state = _state_of_several()
    module = None if state is None else module_of(wrapper, state)
    if module is None:
        return original()
    module.train(training is not False)
    return module(*args, **kwargs)


def _layer_attributes() -> dict[tuple[int, str], Any] | None:
    state = _state_of_several()
    return None if state is None else state.layer_attributes()


def _keep_attribute(layer: Any, name: str) -> None:
    state = current_state()
    if state is not None:
        state.set_attributes[(id(layer), name)] = layer


def _dropout_generator(device: torch.device) -> torch.Generator | None:
    replica = context.running_replica()
    state = _state_of_several()
    if state is None or replica is None:
        return None
    if state.trace is not None:
        return state.trace.generator_of_run(device)
    return replica.seeds.generator(device)


def _captured_cond(original: Callable[..., Any], pred: Any, true_fn: Callable[[], Any], false_fn: Any) -> Any:
    state = current_state()
    if state is None or state.trace is None or not isinstance(pred, torch.Tensor):
        return original(pred, true_fn, false_fn)
    return state.trace.cond(state.state_mapping.values(), pred, true_fn, false_fn)


def _captured_generator(seed: Any) -> torch.Generator | None:
    state = current_state()
    if state is None or state.trace is None:
        return None
    return state.trace.generator(seed, state.device.torch_device)


def _state_of_several() -> ReplicaState | None:
    """The state of the replica that runs, if its strategy has others too."""
    state, replica = current_state(), context.running_replica()
    several = replica is not None and replica.strategy.num_local_replicas > 1
    return state if several else None


def _layer_losses(layer: Any) -> list[Any] | None:
    state = current_state()
    return None if state is None else state.layer_losses(layer)


def _maybe_build(layer: Any, build: Callable[[], None]) -> None:
    """Builds a layer once for all replicas, in cross-replica context."""
    replica = context.running_replica()
    if replica is None or replica.state is None:
        with _scope_of_model(layer):
            build()
        return
    replica.wait_for_lower()
    if layer.built:
        return
    _being_built.add(id(layer))
    try:
        with context.entered(context.Frame(replica.strategy, None, replica)), keras_seam.without_stateless_scope():
            build()
    finally:
        _being_built.discard(id(layer))


# Layers that a replica is building: `built` may be set before `build` has ended.
_being_built: set[int] = set()


def _is_being_built(layer: Any) -> bool:
    return bool(_being_built) and id(layer) in _being_built


@contextlib.contextmanager
def _outside_strategies() -> Iterator[None]:
    with context.outside_strategies(), keras_seam.without_replica_scope():
        yield


def _state_dict(layer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """torch's state of a layer, with the values that reading its variables gives."""
    variables = {v.raw_value.data_ptr(): v for v in layer.variables if isinstance(v, DistributedVariable)}
    for name, tensor in state.items():
        variable = variables.get(tensor.data_ptr()) if isinstance(tensor, torch.Tensor) else None
        if variable is not None and tensor.shape == variable.raw_value.shape:
            state[name] = variable.read_across_replicas().detach()
    return state


@contextlib.contextmanager
def _loading_state(layer: Any) -> Iterator[None]:
    """Gives all replicas what torch loads into the first one's tensors, also when it raises in the end."""
    before = [(v, v.raw_value._version) for v in layer.variables if isinstance(v, DistributedVariable)]
    try:
        yield
    finally:
        for variable, version in before:
            if variable.raw_value._version != version:
                variable.assign(variable.raw_value.detach().clone())


def _in_replica() -> bool:
    replica = context.creating_replica()
    return replica is not None and replica.state is not None


def _synchronize(model: Any) -> None:
    if model._distribute_strategy is None:
        return
    synchronize(model)
    for variable in model.non_trainable_variables:  # counters, which all replicas have counted alike
        value = variable.read_across_replicas()
        if value is not variable._value and all(torch.equal(value, own.to(value)) for own in variable.components):
            variable.assign(value.clone())


def _scope_of_model(model: Any) -> contextlib.AbstractContextManager[Any]:
    """A model's scope where it is built outside of any: its variables go with the model."""
    strategy = getattr(model, "_distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None or context.has_strategy() else strategy.scope()


def _scope_of(variables: Any) -> contextlib.AbstractContextManager[Any]:
    first = next(iter(variables or ()), None)
    if not isinstance(first, DistributedVariable) or context.has_strategy():
        return contextlib.nullcontext()
    return first.strategy.scope()

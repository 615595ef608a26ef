"""`torch.nn.Module`s inside Keras models, one copy per replica.

A torch module holds its parameters and buffers itself, so threads that share it
would share them. Each replica calls a copy whose parameters are the replica's
own components. Buffers (a torch batch norm's statistics) start each run from the
module's and are merged into it when the run ends: numbers to the mean over the
replicas that called it, counters to the first one's.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch

from keras_distrib.capture.boundaries import CannotCapture
from keras_distrib.replicas.state import ReplicaState, copy_into

_COPIES = "_keras_distrib_copies"
_lock = threading.Lock()


def module_of(wrapper: Any, state: ReplicaState) -> torch.nn.Module | None:
    """The calling replica's copy of a wrapped module; None if it is nobody's.

    Args:
        wrapper: Keras' `TorchModuleWrapper`.
        state: the calling replica's state.
    """
    variables = [variable for variable in wrapper.variables if hasattr(variable, "read_in_replica")]
    if not variables and any(True for _ in wrapper.module.parameters()):
        return None  # made outside of the strategy
    with _lock:
        copies = wrapper.__dict__.setdefault(_COPIES, {})
        module = copies.get(state.index)
        if module is None:
            module = copies[state.index] = _copied(wrapper.module, variables, state)
        if id(wrapper) not in state.torch_modules:
            state.torch_modules[id(wrapper)] = wrapper
            _copy_buffers(wrapper.module, module)
            for variable in variables:  # parameters that were frozen since
                variable.read_in_replica(state).requires_grad_(variable._value.requires_grad)
    return module


def call_in_graph(
    wrapper: Any, state: ReplicaState, args: tuple[Any, ...], training: Any, kwargs: dict[str, Any]
) -> Any:
    """Calls a wrapped module in a step that is being traced."""
    module = wrapper.module
    if any(True for _ in module.buffers()):
        raise CannotCapture(f"the torch module {type(module).__name__} has buffers")
    by_parameter = {id(variable._value): variable for variable in wrapper.variables}
    tensors = {}
    for name, parameter in module.named_parameters():
        variable = by_parameter.get(id(parameter))
        if variable is None:
            raise CannotCapture(f"a parameter of the torch module {type(module).__name__} is no Keras variable")
        tensors[name] = state.get_current_value(variable)
    with _lock:
        was_training = module.training
        module.train(training is not False)
        try:
            return torch.func.functional_call(module, tensors, args, kwargs)
        finally:
            module.train(was_training)


def merge_buffers(states: Sequence[ReplicaState]) -> None:
    """Gives the wrapped modules the buffers of the copies that a run has called."""
    wrappers = {key: wrapper for state in states for key, wrapper in state.torch_modules.items()}
    for key, wrapper in wrappers.items():
        copies = wrapper.__dict__[_COPIES]
        called = [copies[state.index] for state in states if key in state.torch_modules]
        for name, buffer in wrapper.module.named_buffers():
            own = [module.get_buffer(name).to(buffer.device) for module in called]
            if buffer.is_floating_point():
                copy_into(buffer, torch.stack(own).mean(0))
            else:
                copy_into(buffer, own[0])


def _copied(module: torch.nn.Module, variables: list[Any], state: ReplicaState) -> torch.nn.Module:
    memo = {id(variable._value): variable.read_in_replica(state) for variable in variables}
    try:
        return copy.deepcopy(module, memo).to(state.device.torch_device)
    except Exception as error:
        raise RuntimeError(
            "Each replica needs a copy of the torch modules in a model, and this one cannot be copied. "
            f"Received: module={type(module).__name__}. Make it work with `copy.deepcopy`."
        ) from error


def _copy_buffers(source: torch.nn.Module, target: torch.nn.Module) -> None:
    for name, buffer in source.named_buffers():
        copy_into(target.get_buffer(name), buffer)

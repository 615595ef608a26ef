"""Applying gradients: summed over replicas first, then one equal update."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from keras_distrib import context, keras_seam
from keras_distrib.options import ReduceOp
from keras_distrib.replicas.replica_context import ReplicaContext
from keras_distrib.replicas.state import ReplicaState
from keras_distrib.strategy import Strategy
from keras_distrib.variables import DistributedVariable, GradientAccumulator

Gradients = list[torch.Tensor | None]
Apply = Callable[..., Any]


class _Entered(threading.local):
    """Whether the calling thread is inside of something."""

    entered = False


BUCKET_BYTES = 25 << 20  # of gradients that a captured step reduces together, as soon as they are there

_for_all = _Entered()  # applying gradients for all replicas at once
_skipping = _Entered()  # `skip_gradients_aggregation`


@contextlib.contextmanager
def skip_gradients_aggregation() -> Iterator[None]:
    """Optimizers applied inside take the gradients as they are, on each replica.

    For gradients that a step has reduced itself: if they differ by replica, so
    will the variables.

    Example:

    ```python
    def step(inputs):
        ...
        gradients = keras_distrib.get_replica_context().all_reduce("sum", gradients)
        with keras_distrib.skip_gradients_aggregation():
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    ```
    """
    outer, _skipping.entered = _skipping.entered, True
    try:
        yield
    finally:
        _skipping.entered = outer


def apply(optimizer: Any, original: Apply, grads: Sequence[Any], variables: Sequence[Any] | None) -> Any:
    """Stands in for every optimizer's `apply`.

    In a replica's step the outermost call meets the other replicas, sums the
    gradients, and only then lets Keras clip, decay and apply them.
    """
    replica = context.running_replica()
    if _for_all.entered:
        return original(grads, variables)
    if replica is None or replica.state is None:
        _refuse_across_replicas(optimizer, variables)
        return original(grads, variables)
    if replica.state.in_update:
        return original(grads, variables)
    variables = None if variables is None else list(variables)
    _require_own_variables(optimizer, variables, replica.strategy)
    grads = list(grads)
    trace = replica.state.trace
    if trace is None:
        return _apply_in_replica(replica, optimizer, original, grads, variables)
    skips = _skipping.entered

    def run(grads: Gradients) -> None:  # traced, or as eager code at each replay
        running = context.running_replica()
        if running is not None:
            with skip_gradients_aggregation() if skips else contextlib.nullcontext():
                _apply_in_replica(running, optimizer, original, grads, variables)

    return trace.attempt(name_of(optimizer), grads, run)


def name_of(optimizer: Any) -> str:
    """What a meeting to apply an optimizer's gradients is called."""
    return f"{optimizer.name}.apply"


def _apply_in_replica(
    replica: ReplicaContext, optimizer: Any, original: Apply, grads: Gradients, variables: Any
) -> Any:
    name = name_of(optimizer)
    if _skipping.entered:
        return _apply_own(replica, original, grads, variables)
    if replica.strategy.updates_once:
        return _apply_once(replica, name, optimizer, original, grads, variables)
    if optimizer.gradient_accumulation_steps and type(optimizer).apply is keras_seam.BaseOptimizer.apply:
        return _accumulate(replica, name, optimizer, original, grads, variables)
    return _apply_everywhere(replica, name, optimizer, original, grads, variables)


def _apply_everywhere(
    replica: ReplicaContext, name: str, optimizer: Any, original: Apply, grads: Gradients, variables: Any
) -> Any:
    """Every replica updates its own components with the same summed gradients."""
    if replica.run_state.trace is not None:
        summed = _sum_in_graph(replica, name, grads, variables or optimizer._trainable_variables)
        return _update(replica, original, summed, summed, variables)

    def act(contributions: list[Contribution]) -> list[Gradients]:
        _build(optimizer, variables)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        for accumulator in getattr(inner, "_accumulated_gradients", ()):
            if isinstance(accumulator, GradientAccumulator):
                accumulator.hold_sums()
        return sum_gradients(replica, contributions, variables or optimizer._trainable_variables)

    summed = replica.meet_across(name, Contribution.of(replica.run_state, grads), act)
    return _update(replica, original, summed, summed, variables)


def _sum_in_graph(replica: ReplicaContext, name: str, grads: Gradients, variables: Sequence[Any]) -> Gradients:
    """Sums gradients bucket by bucket, each where backward has computed the last of it."""
    summed: Gradients = [None] * len(grads)
    for number, bucket in enumerate(buckets(grads)):
        targets = [variables[position] for position in bucket]

        def act(contributions: list[Contribution], targets: Sequence[Any] = targets) -> list[Gradients]:
            return sum_gradients(replica, contributions, targets)

        own = Contribution.of(replica.run_state, [grads[position] for position in bucket])
        results = replica.meet_across(f"{name}, bucket {number}", own, act, _sums_like, early=True)
        for position, total in zip(bucket, results, strict=True):
            summed[position] = total
    return summed


def buckets(grads: Gradients, most_bytes: int | None = None) -> list[list[int]]:
    """Positions of gradients that are reduced together, the last ones, which backward gives first, before the others.

    Args:
        grads: the gradients, in the order of the variables.
        most_bytes: of a bucket with several; `BUCKET_BYTES` if None.

    Example:

    >>> import torch
    >>> from keras_distrib.training.optimizer import buckets
    >>> buckets([torch.ones(2), torch.ones(1), torch.ones(1)], most_bytes=8)
    [[2, 1], [0]]
    """
    most = BUCKET_BYTES if most_bytes is None else most_bytes
    found: list[list[int]] = [[]]
    held = 0
    for position in reversed(range(len(grads))):
        grad = grads[position]
        size = 0 if grad is None else grad.numel() * grad.element_size()
        if found[-1] and held + size > most:
            found.append([])
            held = 0
        found[-1].append(position)
        held += size
    return found


def _accumulate(
    replica: ReplicaContext, name: str, optimizer: Any, original: Apply, grads: Gradients, variables: Any
) -> Any:
    """Adds gradients up on each replica, and sums over replicas once per update."""
    state = replica.run_state
    if not optimizer.built:
        replica.meet_across(f"build of {optimizer.name}", None, lambda all_: [_build(optimizer, variables)] * len(all_))
    targets = variables or optimizer._trainable_variables
    if (int(optimizer._iterations.value) + 1) % optimizer.gradient_accumulation_steps:
        weight = Contribution.of(state, grads).weight
        own: Gradients = [None if grad is None else grad.detach() * weight for grad in grads]
        nothing: Gradients = [None if grad is None else torch.zeros_like(grad) for grad in own]
        return _update(replica, original, own, nothing, variables)
    kept = [optimizer._accumulated_gradients[optimizer._get_variable_index(target)] for target in targets]

    def act(contributions: list[Contribution]) -> list[Gradients]:
        summed = sum_gradients(replica, contributions, targets)
        for position, accumulator in enumerate(kept):
            if accumulator is None:
                continue
            earlier = accumulator.value.clone()
            accumulator.assign(torch.zeros_like(earlier))
            for result in summed:
                grad = result[position]
                if grad is not None:
                    result[position] = grad + earlier.to(grad.device)
        return summed

    summed = replica.meet_across(name, Contribution.of(replica.run_state, grads), act)
    return _update(replica, original, summed, summed, variables)


def _apply_own(replica: ReplicaContext, original: Apply, grads: Gradients, variables: Any) -> Any:
    """Each replica applies its own gradients, which the user has reduced."""
    if replica.strategy.updates_once:
        raise ValueError(
            "`skip_gradients_aggregation` needs variables of each replica's own. "
            f"Received: {replica.strategy!r}, whose replicas share their variables. Use a MirroredStrategy."
        )
    return _update(replica, original, grads, grads, variables)


def _update(replica: ReplicaContext, original: Apply, grads: Gradients, for_absent: Gradients, variables: Any) -> Any:
    """Updates this replica's components; the first one also those of replicas without rows.

    Args:
        replica: the calling replica.
        original: the optimizer's own `apply`.
        grads: what this replica applies.
        for_absent: what those without rows apply.
        variables: what the gradients belong to, or None.
    """
    with torch.no_grad():
        with replica.run_state.updating():
            result = original(grads, variables)
        _update_absent(replica, original, for_absent, variables)
    return result


def _update_absent(replica: ReplicaContext, original: Apply, grads: Gradients, variables: Any) -> None:
    strategy, state = replica.strategy, replica.run_state
    if state.num_active == strategy.num_local_replicas or state.index != replica.participants[0]:
        return
    for index in set(range(strategy.num_local_replicas)) - set(replica.participants):
        device = strategy.devices[index]
        absent = ReplicaState(
            strategy, index, strategy.replica_id(index), device, state.num_active, 0, state.global_rows
        )
        moved = [None if grad is None else grad.to(device.torch_device) for grad in grads]
        with replica.standing_in(absent), absent.updating():
            original(moved, variables)


def _apply_once(
    replica: ReplicaContext, name: str, optimizer: Any, original: Apply, grads: Gradients, variables: Any
) -> Any:
    """One replica's thread updates the variables that all of them share."""

    if replica.run_state.trace is not None:
        return _apply_once_in_graph(replica, name, optimizer, original, grads, variables)

    def act(contributions: list[Contribution]) -> list[Any]:
        _build(optimizer, variables)
        targets = variables or optimizer._trainable_variables
        summed = sum_gradients(replica, contributions, targets)[0]
        device = replica.strategy.parameter_device.torch_device
        moved = [None if grad is None else grad.to(device) for grad in summed]
        _for_all.entered = True
        try:
            with torch.no_grad():
                return [original(moved, variables)] * len(contributions)
        finally:
            _for_all.entered = False

    result = replica.meet_across(name, Contribution.of(replica.run_state, grads), act)
    replica.run_state.note_touched((*optimizer.variables, *(variables or optimizer._trainable_variables)))
    return result


def _apply_once_in_graph(
    replica: ReplicaContext, name: str, optimizer: Any, original: Apply, grads: Gradients, variables: Any
) -> None:
    """The same in a graph: what lies between two meetings one replica does for all."""

    summed = _sum_in_graph(replica, name, grads, variables or optimizer._trainable_variables)
    replica.meet(f"start of {name}", None, lambda all_: [None] * len(all_), lambda own: None, once=True)
    with torch.no_grad(), replica.run_state.updating():
        original(summed, variables)
    replica.meet(f"end of {name}", None, lambda all_: [None] * len(all_), lambda own: None)


def _sums_like(own: Contribution) -> Gradients:
    """New tensors like the sums of a replica's gradients."""
    return [None if grad is None else torch.empty_like(grad) for grad in own.gradients]


class Contribution(NamedTuple):
    """One replica's gradients, and what they count in the sum."""

    gradients: Gradients
    weight: float

    @classmethod
    def of(cls, state: ReplicaState, grads: Gradients) -> Contribution:
        weight = state.share if state.averages_gradients and state.num_active > 1 else 1.0
        return cls([_detached(grad) for grad in grads], weight)


def sum_gradients(
    replica: ReplicaContext, contributions: list[Contribution], variables: Sequence[Any]
) -> list[Gradients]:
    """Sums gradients over replicas, position by position.

    Args:
        replica: one of the replicas that run; says how.
        contributions: each running replica's gradients and their weight; None
            where a loss does not depend on a variable there.
        variables: what the gradients belong to.

    Returns:
        For each replica the sums; None where no replica has a gradient, and the
        first replica's where the gradient is to overwrite the variable.
    """
    lengths = [len(contribution.gradients) for contribution in contributions]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"All replicas must apply the same number of gradients. Received: gradients by replica={lengths}"
        )
    if len(contributions) == 1:
        return [contributions[0].gradients]
    devices = [replica.strategy.devices[index].torch_device for index in replica.participants]
    results: list[Gradients] = [[None] * lengths[0] for _ in contributions]
    positions, columns = [], []
    for position in range(lengths[0]):
        column = [contribution.gradients[position] for contribution in contributions]
        present = [grad for grad in column if grad is not None]
        variable = variables[position] if position < len(variables) else None
        if not present or getattr(variable, "overwrite_with_gradient", False):
            for result, device in zip(results, devices, strict=True):
                result[position] = present[0].to(device) if present else None
            continue
        pairs = zip(column, devices, strict=True)
        columns.append([torch.zeros_like(present[0], device=d) if grad is None else grad for grad, d in pairs])
        positions.append(position)
    if not columns:
        return results
    tensors = [list(own) for own in zip(*columns, strict=True)]
    weights = [contribution.weight for contribution in contributions]
    for result, sums in zip(results, _weighted_sum(replica.strategy, tensors, weights), strict=True):
        for position, total in zip(positions, sums, strict=True):
            result[position] = total
    return results


def _weighted_sum(
    strategy: Strategy, tensors: list[list[torch.Tensor]], weights: Sequence[float]
) -> list[list[torch.Tensor]]:
    """Each list times its weight, summed over the lists."""
    ops = strategy.cross_device_ops
    if all(weight == 1.0 for weight in weights):
        return ops.all_reduce(ReduceOp.SUM, tensors)
    if all(weight == weights[0] for weight in weights):  # equal shares
        return ops.all_reduce(ReduceOp.MEAN, tensors)
    return ops.all_reduce(ReduceOp.SUM, [_scaled(own, weight) for own, weight in zip(tensors, weights, strict=True)])


def _scaled(tensors: list[torch.Tensor], weight: float) -> list[torch.Tensor]:
    if any(tensor.is_sparse for tensor in tensors):
        return [tensor * weight for tensor in tensors]
    return list(torch._foreach_mul(tensors, weight))  # pyright: ignore[reportPrivateImportUsage]


def _detached(grad: Any) -> torch.Tensor | None:
    return grad.detach() if isinstance(grad, torch.Tensor) else grad


def _build(optimizer: Any, variables: Any) -> None:
    if not optimizer.built and variables is not None:
        with keras_seam.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)


def _is_distributed(variable: Any) -> bool:
    return isinstance(variable, DistributedVariable) and variable.strategy.num_replicas_in_sync > 1


def _refuse_across_replicas(optimizer: Any, variables: Sequence[Any] | None) -> None:
    targets = list(variables) if variables is not None else optimizer.variables
    if any(_is_distributed(variable) for variable in targets):
        raise RuntimeError(
            f"`{type(optimizer).__name__}.apply` cannot be called in cross-replica context: the gradients of one "
            "replica would update one component of each variable. Received: variables of "
            f"{next(v.strategy for v in targets if _is_distributed(v))!r}. "
            "Call it in the function that `Strategy.run` calls."
        )


def _require_own_variables(optimizer: Any, variables: Sequence[Any] | None, strategy: Strategy) -> None:
    for variable in (*optimizer.variables[:1], *(variables or ())[:1]):
        owner = getattr(variable, "strategy", None)
        if owner is not strategy:
            raise ValueError(
                f"Variable ({variable.path}) was not created in the distribution strategy scope of {strategy!r}. "
                f"Received: a variable of {owner or 'no strategy'!r}, optimizer={optimizer.name!r}. "
                "Create the model and the optimizer inside `with strategy.scope():`."
            )

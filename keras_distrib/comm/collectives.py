"""Collectives that replicas call inside a step, and that carry gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from keras_distrib import keras_seam
from keras_distrib.options import ReduceOp
from keras_distrib.values import leaves, map_structure, pack_like

if TYPE_CHECKING:
    from keras_distrib.replicas.replica_context import ReplicaContext

Tensors = tuple[torch.Tensor, ...]


def all_reduce(replica: ReplicaContext, op: ReduceOp, value: Any) -> Any:
    """Sums or averages a nested structure over the replicas that run."""
    flat = [_as_tensor(leaf) for leaf in leaves(value)]
    if replica.num_active_replicas == 1 or not flat:
        return pack_like(value, [tensor.to(result_dtype(op, tensor.dtype)) for tensor in flat])
    return pack_like(value, _AllReduce.apply(replica, op, *flat))


def all_gather(replica: ReplicaContext, value: Any, axis: int) -> Any:
    """Concatenates a nested structure over the replicas that run."""
    flat = [_as_tensor(leaf) for leaf in leaves(value)]
    for tensor in flat:
        check_gather_axis(tensor, axis)
    if replica.num_active_replicas == 1 or not flat:
        return map_structure(_as_tensor, value)
    return pack_like(value, _AllGather.apply(replica, axis, *flat))


def check_gather_axis(tensor: torch.Tensor, axis: int) -> None:
    """Raises unless `tensor` can be concatenated along `axis`."""
    if tensor.is_sparse:
        raise NotImplementedError(
            "all_gather does not support IndexedSlices, nor other sparse tensors. "
            "Received: a sparse tensor. Gather its indices and values, or `tensor.to_dense()`."
        )
    if not isinstance(axis, int) or axis < 0 or axis >= tensor.ndim:
        raise ValueError(
            "`axis` must be an integer from 0 to the tensor's rank - 1; a scalar has no axis to gather along. "
            f"Received: axis={axis!r}, shape={tuple(tensor.shape)}. Add an axis to scalars first."
        )


def reduce_lists(op: ReduceOp, lists: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Reduces position by position over replicas, the first replica first.

    Args:
        op: sum or mean.
        lists: for each replica its tensors, alike over replicas.

    Returns:
        For each replica the results on its tensors' devices; replicas on one
        device share them, so they are not to be written to.
    """
    check_alike(lists)
    dtypes = [result_dtype(op, tensor.dtype) for tensor in lists[0]]
    lists = [[tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)] for tensors in lists]
    totals = list(lists[0])
    for tensors in lists[1:]:
        moved = [tensor.to(total.device) for tensor, total in zip(tensors, totals, strict=True)]
        totals = _add(totals, moved)
    if op is ReduceOp.MEAN:
        totals = _divided(totals, len(lists))
    return spread(totals, lists)


def spread(totals: Sequence[torch.Tensor], lists: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Each replica's results: the totals, on the devices of its own tensors."""
    return [[total.to(own.device) for total, own in zip(totals, mine, strict=True)] for mine in lists]


def _add(totals: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if not totals:
        return totals
    if any(tensor.is_sparse for tensor in (*totals, *tensors)):
        return [total + tensor for total, tensor in zip(totals, tensors, strict=True)]
    return list(torch._foreach_add(totals, tensors))  # pyright: ignore[reportPrivateImportUsage]


def result_dtype(op: ReduceOp, dtype: torch.dtype) -> torch.dtype:
    """What a reduction of a dtype gives: counts of bools, and float64 means of integers."""
    if op is ReduceOp.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        return torch.float64
    return torch.int64 if dtype is torch.bool else dtype


def _divided(totals: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    if not totals or any(tensor.is_sparse for tensor in totals):
        return [tensor / count for tensor in totals]
    return list(torch._foreach_div(totals, count))  # pyright: ignore[reportPrivateImportUsage]


def check_alike(lists: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raises unless all replicas have tensors of the same shapes."""
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in lists]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            "All replicas must reduce tensors of the same shapes. "
            f"Received: shapes by replica={shapes}. Reduce the sums of the parts of a batch, or use `all_gather`."
        )


class _AllReduce(torch.autograd.Function):
    """Sum or mean over replicas; its gradient is the same collective."""

    @staticmethod
    def forward(ctx: Any, replica: ReplicaContext, op: ReduceOp, *tensors: torch.Tensor) -> Tensors:
        ctx.replica, ctx.op = replica, op
        return _meet_reduce(replica, op, "all_reduce", tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *_reduce_gradients(ctx.replica, ctx.op, "all_reduce", gradients)


def _meet_reduce(replica: ReplicaContext, op: ReduceOp, name: str, tensors: Tensors) -> Tensors:
    def act(lists: list[Tensors]) -> list[Tensors]:
        with torch.no_grad():
            reduced = replica.strategy.cross_device_ops.all_reduce(op, lists)
            return [tuple(t.clone() for t in result) for result in reduced]

    def like(own: Tensors) -> Tensors:
        return tuple(torch.empty_like(tensor, dtype=result_dtype(op, tensor.dtype)) for tensor in own)

    return replica.meet(f"{name}({op.name})", tuple(t.detach() for t in tensors), act, like)


def _reduce_gradients(replica: ReplicaContext, op: ReduceOp, name: str, gradients: Tensors) -> Tensors:
    """The gradient that reaches a replica through a collective, from all replicas' losses.

    Where gradients are to be averaged by the shares, a replica's loss counts by its
    share: what goes out is weighted by it, and what comes in is divided by the
    receiver's, which multiplies its gradients in the end.
    """
    share = replica.run_state.share if replica.run_state.averages_gradients else 1.0
    if share != 1.0:
        gradients = tuple(gradient * share for gradient in gradients)
    reduced = _meet_reduce(replica, op, f"gradient of {name}", gradients)
    return reduced if share == 1.0 else tuple(gradient / share for gradient in reduced)


class _AllGather(torch.autograd.Function):
    """Concatenation over replicas; a replica's gradient is its slice of the sum."""

    @staticmethod
    def forward(ctx: Any, replica: ReplicaContext, axis: int, *tensors: torch.Tensor) -> Tensors:
        ctx.replica, ctx.axis = replica, axis

        def act(lists: list[Tensors]) -> list[tuple[Tensors, list[int]]]:
            return _gather_lists(lists, axis)

        like = _gathered_like(replica, axis)
        results, ctx.starts = replica.meet(f"all_gather(axis={axis})", tuple(t.detach() for t in tensors), act, like)
        ctx.lengths = [tensor.shape[axis] for tensor in tensors]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        summed = _reduce_gradients(ctx.replica, ReduceOp.SUM, "all_gather", gradients)
        parts = zip(summed, ctx.starts, ctx.lengths, strict=True)
        return None, None, *(grad.narrow(ctx.axis, start, length) for grad, start, length in parts)


def _gathered_like(replica: ReplicaContext, axis: int) -> Callable[[Tensors], tuple[Tensors, list[int]]] | None:
    """For a captured step: what a gather of equal parts gives; None where parts may differ."""
    state = replica.run_state
    if state.rows is None or state.rows * state.num_active != state.global_rows:
        return None

    def like(own: Tensors) -> tuple[Tensors, list[int]]:
        lengths = [tensor.shape[axis] for tensor in own]
        shapes = [
            [*t.shape[:axis], n * state.num_active, *t.shape[axis + 1 :]] for t, n in zip(own, lengths, strict=True)
        ]
        # Where a replica's part starts is a constant of its graph.
        starts = [replica.participants.index(state.index) * length for length in lengths]
        if state.trace is not None:
            state.trace.uses_replica_id = True
        return tuple(tensor.new_empty(shape) for tensor, shape in zip(own, shapes, strict=True)), starts

    return like


def _gather_lists(lists: Sequence[Tensors], axis: int) -> list[tuple[Tensors, list[int]]]:
    """For each replica the concatenated tensors and where its own part starts."""
    for column in zip(*lists, strict=True):
        others = [tuple(n for i, n in enumerate(tensor.shape) if i != axis) for tensor in column]
        if any(other != others[0] for other in others):
            raise ValueError(
                f"Shape mismatch: replicas may only differ along axis {axis}. "
                f"Received: shapes by replica={[tuple(tensor.shape) for tensor in column]}"
            )
    results, ends = [], [0] * len(lists[0])
    for mine in lists:
        starts, ends = ends, [end + tensor.shape[axis] for end, tensor in zip(ends, mine, strict=True)]
        columns = zip(*lists, strict=True)
        joined = tuple(
            torch.cat([tensor.to(own.device) for tensor in column], axis)
            for own, column in zip(mine, columns, strict=True)
        )
        results.append((joined, starts))
    return results


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else keras_seam.convert_to_tensor(value)

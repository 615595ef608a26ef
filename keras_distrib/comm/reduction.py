"""Reductions and gathers of per-replica values, in cross-replica context."""

from __future__ import annotations

from typing import Any

import torch

from keras_distrib import keras_seam
from keras_distrib.comm.collectives import check_gather_axis, reduce_lists, result_dtype
from keras_distrib.options import ReduceOp
from keras_distrib.values import DistributedValues, PerReplica

Axis = int | tuple[int, ...] | None


def _components(value: DistributedValues, device: torch.device | None) -> list[torch.Tensor]:
    values = value.active_values if isinstance(value, PerReplica) else value.values
    return [keras_seam.convert_to_tensor(component).to(device or "cpu") for component in values]


def reduce(op: ReduceOp, value: Any, axis: Axis, replicas: int, device: torch.device | None) -> Any:
    """Reduces one leaf; see `Strategy.reduce`.

    Args:
        op: sum or mean.
        value: a per-replica value, or one that all replicas share.
        axis: axis within each replica, or None.
        replicas: how many local replicas there are.
        device: where the result is wanted.
    """
    if isinstance(value, DistributedValues):
        parts = _components(value, device)
        return _reduce_parts(op, parts) if axis is None else _reduce_axis(op, parts, axis)
    if axis is None:
        return _reduce_shared(op, value, replicas)
    tensor = keras_seam.convert_to_tensor(value)
    return _reduce_axis(op, [tensor] * max(1, replicas), axis)


def _reduce_parts(op: ReduceOp, parts: list[torch.Tensor]) -> torch.Tensor:
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            "Per-replica values of different shapes cannot be reduced element by element. "
            f"Received: shapes by replica={[tuple(part.shape) for part in parts]}, axis=None. "
            "Give the axis of the rows (axis=0), or gather them."
        )
    return reduce_lists(op, [[part] for part in parts])[0][0]


def _reduce_axis(op: ReduceOp, parts: list[torch.Tensor], axis: int | tuple[int, ...]) -> torch.Tensor:
    axes = _normalized_axes(parts, axis)
    kept = [tuple(n for i, n in enumerate(part.shape) if i not in axes) for part in parts]
    if len(set(kept)) > 1:
        raise ValueError(
            "Reducing over an axis needs per-replica values that are alike in all other axes. "
            f"Received: axis={axis}, shapes by replica={[tuple(part.shape) for part in parts]}. "
            "Include the axis of the rows (axis 0) in `axis`."
        )
    dtype = result_dtype(op, parts[0].dtype)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype  # a sum of many rows
    total = _reduce_parts(ReduceOp.SUM, [part.sum(dim=axes, dtype=wide) for part in parts])
    if op is ReduceOp.MEAN:
        total = total / sum(part.numel() // max(1, _size(kept[0])) for part in parts)
    return total.to(dtype)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _normalized_axes(parts: list[torch.Tensor], axis: int | tuple[int, ...]) -> tuple[int, ...]:
    axes = axis if isinstance(axis, tuple) else (axis,)
    rank = min(part.ndim for part in parts)
    for one in axes:
        if not isinstance(one, int) or isinstance(one, bool):
            raise TypeError(f"`axis` must be an int, a tuple of ints, or None. Received: axis={axis!r}")
        if not -rank <= one < rank:
            raise ValueError(
                f"`axis` is out of range for values of rank {rank}. Received: axis={axis!r}, "
                f"shapes by replica={[tuple(part.shape) for part in parts]}. Scalars reduce with axis=None."
            )
    return tuple(sorted({one % rank for one in axes}))


def _reduce_shared(op: ReduceOp, value: Any, replicas: int) -> Any:
    if op is ReduceOp.SUM and replicas > 1:
        if isinstance(value, int | float) and value == 0:
            return value
        raise ValueError(
            f"A non-DistributedValues value {value!r} cannot be reduced with the given reduce op ReduceOp.SUM: it is "
            f"the same on all {replicas} replicas, and it is not said whether to count it once or {replicas} times. "
            "Reduce a value that `run` returned, use ReduceOp.MEAN, or multiply yourself."
        )
    return value


def gather(value: Any, axis: int, device: torch.device | None) -> Any:
    """Concatenates one leaf over replicas; see `Strategy.gather`."""
    if not isinstance(value, DistributedValues):
        return value
    parts = _components(value, device)
    for part in parts:
        check_gather_axis(part, axis)
    others = [tuple(n for i, n in enumerate(part.shape) if i != axis) for part in parts]
    if len(set(others)) > 1:
        raise ValueError(
            f"Shape mismatch: per-replica values may only differ along axis {axis}. "
            f"Received: shapes by replica={[tuple(part.shape) for part in parts]}"
        )
    return torch.cat(parts, dim=axis)

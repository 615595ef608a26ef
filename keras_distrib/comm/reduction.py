"""Reductions and gathers of per-replica values, in cross-replica context."""

from __future__ import annotations

from typing import Any

import torch

from keras_distrib import keras_seam
from keras_distrib.comm.collectives import check_gather_axis, result_dtype
from keras_distrib.comm.cross_device_ops import CrossDeviceOps
from keras_distrib.options import ReduceOp
from keras_distrib.values import Mirrored, PerReplica, components

Axis = int | tuple[int, ...] | None


def _parts(value: Any) -> list[torch.Tensor] | None:
    """The components of a per-replica value; None if the value is the same for all."""
    found = components(value)
    return None if found is None else [keras_seam.convert_to_tensor(part).detach() for part in found]


def reduce(op: ReduceOp, value: Any, axis: Axis, replicas: int, ops: CrossDeviceOps) -> Any:
    """Reduces one leaf; see `Strategy.reduce`.

    Args:
        op: sum or mean.
        value: a per-replica value, or one that all replicas share.
        axis: axis within each replica, or None.
        replicas: how many local replicas there are.
        ops: how values are reduced over devices.

    Returns:
        A tensor on the first replica's device.
    """
    parts = _parts(value)
    if parts is not None:
        if isinstance(value, Mirrored) and axis is None:
            return reduce_shared(op, parts[0], replicas)
        return _reduce_parts(op, parts, ops) if axis is None else _reduce_axis(op, parts, axis, ops)
    if axis is None:
        return reduce_shared(op, value, replicas)
    tensor = keras_seam.convert_to_tensor(value).detach()
    return _reduce_axis(op, [tensor] * max(1, replicas), axis, ops)


def _reduce_parts(op: ReduceOp, parts: list[torch.Tensor], ops: CrossDeviceOps) -> torch.Tensor:
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            "Per-replica values of different shapes cannot be reduced element by element. "
            f"Received: shapes by replica={[tuple(part.shape) for part in parts]}, axis=None. "
            "Give the axis of the rows (axis=0), or gather them."
        )
    return (
        ops.reduce(op, PerReplica(parts), parts[0]) if len(parts) > 1 else parts[0].to(result_dtype(op, parts[0].dtype))
    )


def _reduce_axis(
    op: ReduceOp, parts: list[torch.Tensor], axis: int | tuple[int, ...], ops: CrossDeviceOps
) -> torch.Tensor:
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
    total = _reduce_parts(ReduceOp.SUM, [part.sum(dim=axes, dtype=wide) for part in parts], ops)
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


def reduce_shared(op: ReduceOp, value: Any, replicas: int) -> Any:
    """Reduces what is the same on all replicas.

    Raises:
        ValueError: for a sum over several replicas.
    """
    if op is ReduceOp.SUM and replicas > 1:
        if isinstance(value, int | float) and value == 0:
            return value
        raise ValueError(
            f"A non-DistributedValues value {value!r} cannot be reduced with the given reduce op ReduceOp.SUM: it is "
            f"the same on all {replicas} replicas, and it is not said whether to count it once or {replicas} times. "
            "Reduce a value that `run` returned, use ReduceOp.MEAN, or multiply yourself."
        )
    return value.detach() if isinstance(value, torch.Tensor) else value


def gather(value: Any, axis: int) -> Any:
    """Concatenates one leaf over replicas; see `Strategy.gather`."""
    parts = _parts(value)
    if parts is None:
        return value
    parts = [part.to(parts[0].device) for part in parts]
    for part in parts:
        check_gather_axis(part, axis)
    others = [tuple(n for i, n in enumerate(part.shape) if i != axis) for part in parts]
    if len(set(others)) > 1:
        raise ValueError(
            f"Shape mismatch: per-replica values may only differ along axis {axis}. "
            f"Received: shapes by replica={[tuple(part.shape) for part in parts]}"
        )
    return torch.cat(parts, dim=axis)

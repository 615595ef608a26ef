"""Splitting one global batch over replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from keras_distrib import keras_seam
from keras_distrib.devices import Device
from keras_distrib.values import PerReplica, leaves, map_structure


def split_rows(rows: int, replicas: int) -> list[int]:
    """How many rows each replica gets: ceil(rows / replicas), the rest, then none.

    Formula: as tf.distribute splits an in-memory batch.

    Args:
        rows: rows of the global batch.
        replicas: how many replicas there are.

    Returns:
        A list of `replicas` counts that add up to `rows`.

    Example:

    >>> from keras_distrib.data.split import split_rows
    >>> split_rows(7, 3), split_rows(4, 5)
    ([3, 3, 1], [1, 1, 1, 1, 0])
    """
    piece = -(-rows // replicas)
    return [max(0, min(piece, rows - piece * index)) for index in range(replicas)]


def count_rows(batch: Any) -> int | None:
    """The rows of a batch; None if it holds nothing with an axis of rows.

    Raises:
        ValueError: if its parts differ in rows.
    """
    rows: int | None = None
    for leaf in leaves(batch):
        shape = getattr(leaf, "shape", None)
        if shape is None or len(shape) == 0:
            continue
        if rows is None:
            rows = int(shape[0])
        elif rows != int(shape[0]):
            shapes = [tuple(leaf.shape) for leaf in leaves(batch) if getattr(leaf, "shape", None) is not None]
            raise ValueError(
                "All parts of a batch must have the same number of rows (axis 0). "
                f"Received: shapes={shapes}. Check inputs, targets and sample weights."
            )
    return rows


def split_batch(batch: Any, devices: tuple[Device, ...]) -> tuple[Any, int]:
    """Splits a global batch, each part on its replica's device.

    Parts on the CPU share the batch's storage.

    Args:
        batch: a nested structure of tensors and arrays with the rows in axis 0;
            scalars and None go whole to every replica.
        devices: one per replica.

    Returns:
        The structure with `PerReplica` leaves that carry the row counts, and the
        rows of the whole batch.

    Raises:
        ValueError: if the parts differ in rows, or there are none.
    """
    batch = map_structure(_as_tensor, batch)
    total = count_rows(batch)
    if total is None:
        raise ValueError(
            f"A batch must have rows to be split over replicas, in axis 0 of its tensors. Received: batch={batch!r}. "
            "Call the `batch` method of the dataset, or otherwise batch it with the global batch size."
        )
    rows = split_rows(total, len(devices))

    def split(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            return leaf
        parts = [_own_version(part) for part in torch.split(leaf, rows)]
        return PerReplica([to_device(part, device) for part, device in zip(parts, devices, strict=True)], rows)

    return map_structure(split, batch), total


def _own_version(part: torch.Tensor) -> torch.Tensor:
    """The same storage, but no view: a write into one replica's rows is none into another's.

    torch counts writes by the whole tensor of which parts are views, and refuses
    to differentiate what was computed from it before.
    """
    return part if part.requires_grad else part.data


def to_device(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """Copies to a GPU from pinned memory, so that the copy overlaps computation."""
    target = device.torch_device
    if tensor.device == target:
        return tensor
    if target.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(target, non_blocking=True)
    return tensor.to(target)


def _as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, torch.Tensor | str | bytes):
        return leaf
    if isinstance(leaf, np.ndarray) or hasattr(leaf, "__array__"):
        with keras_seam.device("cpu"):
            return keras_seam.convert_to_tensor(leaf)
    return leaf

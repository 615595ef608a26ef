"""Cutting one global batch into the parts of replicas, each on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from keras_distrib.data.sharding import Rows, pieces, split_rows as split_rows
from keras_distrib.data.sources import to_rows
from keras_distrib.devices import Device
from keras_distrib.values import PerReplica, leaves, map_structure


class SplitBatch:
    """A per-replica batch that an input pipeline has made.

    Attributes:
        parts: the structure with `PerReplica` leaves.
        rows: rows over all local replicas.
    """

    def __init__(self, parts: Any, rows: int, copies: Copies | None = None) -> None:
        self._parts = parts
        self._copies = copies
        self.rows = rows

    @property
    def parts(self) -> Any:
        if self._copies is not None:
            self._copies.wait()
            self._copies = None
        return self._parts

    def sample(self) -> Any:
        """A replica's part that has rows, for shapes and dtypes."""

        def of_one(leaf: Any) -> Any:
            return leaf.active_values[0] if isinstance(leaf, PerReplica) else leaf

        return map_structure(of_one, self.parts)


class Copies:
    """Copies to GPUs on a stream beside the one that computes."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, torch.Tensor]] = []

    def to_device(self, tensor: torch.Tensor, device: Device) -> torch.Tensor:
        target = device.torch_device
        if target.type != "cuda" or tensor.device.type != "cpu":
            return to_device(tensor, device)
        with torch.cuda.stream(_copy_stream(target)):
            copy = tensor.pin_memory().to(target, non_blocking=True)
            self._events.append((torch.cuda.current_stream(target).record_event(), copy))
        return copy

    def wait(self) -> None:
        """Makes what is computed from now on wait for the copies."""
        for event, tensor in self._events:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(event)
            tensor.record_stream(stream)


_copy_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _copy_streams:
        _copy_streams[device] = torch.cuda.Stream(device)
    return _copy_streams[device]


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


def counted(batch: Any) -> tuple[Any, int]:
    """A batch with tensors in place of arrays, and its rows.

    Raises:
        ValueError: if its parts differ in rows, or there are none.
    """
    batch = map_structure(to_rows, batch)
    total = count_rows(batch)
    if total is None:
        raise ValueError(
            f"A batch must have rows to be split over replicas, in axis 0 of its tensors. Received: batch={batch!r}. "
            "Call the `batch` method of the dataset, or otherwise batch it with the global batch size."
        )
    return batch, total


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
    batch, total = counted(batch)
    return cut(batch, pieces(total, len(devices)), devices), total


def cut(
    batch: Any,
    rows: Sequence[Rows],
    devices: Sequence[Device],
    copy: Callable[[torch.Tensor, Device], torch.Tensor] | None = None,
) -> Any:
    """The pieces of a counted batch, each on its replica's device.

    Args:
        batch: a structure of tensors, and of arrays of what torch has no dtype for.
        rows: for each replica its rows.
        devices: one per replica.
        copy: puts a tensor on a device; None copies at once.
    """
    counts = [piece.length for piece in rows]
    copy = copy or to_device
    # The pieces of one worker follow one another: they are cut in one call.
    before, after = rows[0].start, rows[-1].stop

    def split(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.ndim:
            return PerReplica([leaf[piece.start : piece.stop] for piece in rows], counts)
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            return leaf
        if leaf.is_sparse:
            chosen = [leaf.index_select(0, torch.arange(piece.start, piece.stop, device=leaf.device)) for piece in rows]
            return PerReplica([copy(part, device) for part, device in zip(chosen, devices, strict=True)], counts)
        own = [_own_version(part) for part in torch.split(leaf, [before, *counts, leaf.shape[0] - after])[1:-1]]
        return PerReplica([copy(part, device) for part, device in zip(own, devices, strict=True)], counts)

    return map_structure(split, batch)


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

"""How tensors are summed over the devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.cuda import nccl

from keras_distrib import devices as _devices
from keras_distrib.comm.collectives import reduce_lists, spread
from keras_distrib.devices import Device
from keras_distrib.options import ReduceOp

Lists = Sequence[Sequence[torch.Tensor]]


class CrossDeviceOps:
    """Sums the gradients of all local replicas; the base of the ways to do it.

    Example:

    >>> import keras_distrib
    >>> issubclass(keras_distrib.ReductionToOneDevice, keras_distrib.CrossDeviceOps)
    True
    """

    def all_reduce(self, op: ReduceOp, lists: Lists) -> list[list[torch.Tensor]]:
        """Reduces position by position over replicas.

        Args:
            op: sum or mean.
            lists: for each replica its tensors, of the same shapes on all.

        Returns:
            For each replica the results on its device, not to be written to:
            replicas on one device may share them.
        """
        raise NotImplementedError


class ReductionToOneDevice(CrossDeviceOps):
    """Adds up on one device, in replica order, and copies the result to all.

    Args:
        reduce_to_device: device name; None means the first replica's device.
        accumulation_fn: from a list of tensors, one per replica, to their sum;
            None means adding them in order.

    Raises:
        ValueError: if there is no such device.

    Example:

    >>> import keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(
    ...     ["cpu:0"], cross_device_ops=keras_distrib.ReductionToOneDevice())
    """

    def __init__(
        self, reduce_to_device: Any = None, accumulation_fn: Callable[[list[torch.Tensor]], torch.Tensor] | None = None
    ) -> None:
        self._device = None if reduce_to_device is None else _devices.resolve(reduce_to_device).torch_device
        self._accumulate = accumulation_fn

    def all_reduce(self, op: ReduceOp, lists: Lists) -> list[list[torch.Tensor]]:
        moved = lists
        if self._device is not None:
            moved = [[tensor.to(self._device) for tensor in tensors] for tensors in lists]
        if self._accumulate is None:
            return spread(reduce_lists(op, moved)[0], lists)
        totals = [self._accumulate(list(column)) for column in zip(*moved, strict=True)]
        if op is ReduceOp.MEAN:
            totals = [total / len(lists) for total in totals]
        return spread(totals, lists)


class NcclAllReduce(CrossDeviceOps):
    """Sums with NCCL, from GPU to GPU; the default for several GPUs.

    Tensors of one dtype travel in flat packs. Where the replicas do not sit on
    GPUs of their own, it adds up on one device instead.

    Args:
        num_packs: into how many packs the tensors of a dtype are put.

    Raises:
        ValueError: if `num_packs` is less than 1.

    Example:

    >>> import keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(
    ...     ["cpu:0"], cross_device_ops=keras_distrib.NcclAllReduce(num_packs=2))
    """

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 1:
            raise ValueError(f"`num_packs` must be at least 1. Received: num_packs={num_packs}")
        self._num_packs = num_packs

    def all_reduce(self, op: ReduceOp, lists: Lists) -> list[list[torch.Tensor]]:
        if not _on_gpus_of_their_own(lists):
            return reduce_lists(op, lists)
        results: list[list[torch.Tensor]] = [[] for _ in lists]
        for tensors in results:
            tensors.extend([torch.empty(0)] * len(lists[0]))
        for positions in self._packs(lists[0]):
            flats = [torch.cat([tensors[i].reshape(-1) for i in positions]) for tensors in lists]
            nccl.all_reduce(flats)
            for tensors, flat, result in zip(lists, flats, results, strict=True):
                total = flat / len(lists) if op is ReduceOp.MEAN else flat
                parts = total.split([tensors[i].numel() for i in positions])
                for i, part in zip(positions, parts, strict=True):
                    result[i] = part.view(tensors[i].shape)
        return results

    def _packs(self, tensors: Sequence[torch.Tensor]) -> list[list[int]]:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for position, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(position)
        packs = []
        for positions in by_dtype.values():
            size = -(-len(positions) // self._num_packs)
            packs += [positions[start : start + size] for start in range(0, len(positions), size)]
        return packs


def _on_gpus_of_their_own(lists: Lists) -> bool:
    devices = [tensors[0].device for tensors in lists if tensors]
    same_within = all(tensor.device == tensors[0].device for tensors in lists for tensor in tensors)
    dense = not any(tensor.is_sparse for tensors in lists for tensor in tensors)
    cuda = len(devices) > 1 and all(device.type == "cuda" for device in devices)
    return cuda and same_within and dense and len(set(devices)) == len(devices)


def default_for(devices: Sequence[Device]) -> CrossDeviceOps:
    """NCCL for several GPUs, else a sum on the first device."""
    if len({device.torch_device for device in devices}) > 1 and all(device.kind == "gpu" for device in devices):
        return NcclAllReduce()
    return ReductionToOneDevice()

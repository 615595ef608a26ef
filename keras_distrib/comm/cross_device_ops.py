"""How tensors are reduced over the devices of one process, and copied to them.

*Destinations* say where a result is wanted: a device name, or a per-replica
value, variable or tensor on whose devices it is then put.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.cuda import nccl

from keras_distrib import devices as _devices, keras_seam
from keras_distrib.comm.collectives import check_alike, reduce_lists, result_dtype
from keras_distrib.devices import Device
from keras_distrib.options import ReduceOp
from keras_distrib.values import DistributedValues, Mirrored, PerReplica, components

Lists = Sequence[Sequence[torch.Tensor]]
Pairs = Sequence[tuple[PerReplica, Any]]


class CrossDeviceOps:
    """Reduces per-replica values and copies results to devices; a base class.

    A strategy sums gradients, and whatever else is reduced over its replicas, with
    the one it was given. To write one, subclass and override
    `reduce_implementation`, and `batch_reduce_implementation` if several tensors
    are better reduced together.

    Example:

    >>> import torch, keras_distrib
    >>> class Loud(keras_distrib.ReductionToOneDevice):
    ...     def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
    ...         print("reducing", len(value_destination_pairs))
    ...         return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)
    >>> from keras_distrib.values import PerReplica
    >>> Loud().reduce("SUM", PerReplica([torch.tensor(1.0), torch.tensor(2.0)]), "cpu:0")
    reducing 1
    tensor(3.)
    """

    def reduce(self, reduce_op: ReduceOp | str, per_replica_value: Any, destinations: Any, options: Any = None) -> Any:
        """Reduces one value and puts the result on the destinations.

        Args:
            reduce_op: `ReduceOp.SUM` or `MEAN`, or their names.
            per_replica_value: a per-replica value of tensors of one shape; any
                other value is copied to the destinations as it is.
            destinations: a device name, or a per-replica value, variable or tensor
                on whose devices the result is put.
            options: handed to the implementation.

        Returns:
            A tensor for one device, a `Mirrored` value for several.

        Raises:
            ValueError: for an unknown `reduce_op`, destinations that are none, or
                unequal shapes.
        """
        op = ReduceOp.from_name(reduce_op)
        check_destinations(destinations)
        value = _as_per_replica(per_replica_value)
        if len(value.values) == 1:
            return self.broadcast_implementation(value.values[0], destinations)
        return self.reduce_implementation(op, value, destinations, options)

    def batch_reduce(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """Reduces several values, each to its own destinations.

        Args:
            reduce_op: `ReduceOp.SUM` or `MEAN`, or their names.
            value_destination_pairs: a list of `(per_replica_value, destinations)`.
            options: handed to the implementation.

        Returns:
            A list of what `reduce` gives for each pair.

        Raises:
            ValueError: for an unknown `reduce_op` or an entry that is no such pair.
        """
        op = ReduceOp.from_name(reduce_op)
        pairs = []
        for pair in value_destination_pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(
                    "Each element of `value_destination_pairs` should be a tuple. "
                    f"Received: {pair!r}. Pass a list of `(per_replica_value, destinations)`."
                )
            check_destinations(pair[1])
            pairs.append((_as_per_replica(pair[0]), pair[1]))
        if all(len(value.values) == 1 for value, _ in pairs):
            return [self.broadcast_implementation(value.values[0], target) for value, target in pairs]
        return self.batch_reduce_implementation(op, pairs, options)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to the destinations.

        Args:
            tensor: a tensor or array.
            destinations: as for `reduce`.

        Returns:
            A tensor for one device, a `Mirrored` value for several.
        """
        check_destinations(destinations)
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: Any
    ) -> Any:
        """What `reduce` does with a value of several replicas; for subclasses to override."""
        raise NotImplementedError(
            f"`{type(self).__name__}` must override `reduce_implementation` (or `batch_reduce_implementation`)."
        )

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: Any
    ) -> list[Any]:
        """What `batch_reduce` does; reduces one after the other unless it is overridden."""
        return [self.reduce_implementation(reduce_op, value, to, options) for value, to in value_destination_pairs]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """What `broadcast` does; for subclasses to override."""
        tensor = keras_seam.convert_to_tensor(tensor)
        return _put([tensor], destination_devices(destinations))

    def all_reduce(self, op: ReduceOp, lists: Lists) -> list[list[torch.Tensor]]:
        """Reduces position by position over replicas, as `batch_reduce` does.

        Args:
            op: sum or mean.
            lists: for each replica its tensors, of the same shapes on all.

        Returns:
            For each replica the results on its device, not to be written to:
            replicas on one device may share them.
        """
        values = [PerReplica(column) for column in zip(*lists, strict=True)]
        reduced = self.batch_reduce_implementation(op, [(value, value) for value in values], None) if values else []
        columns = [
            result.values if isinstance(result, DistributedValues) else (result,) * len(lists) for result in reduced
        ]
        return [list(own) for own in zip(*columns, strict=True)] if columns else [[] for _ in lists]


class _ListReduction(CrossDeviceOps):
    """Reduces the tensors of all pairs together, as one list for each replica."""

    def _reduce_lists(self, op: ReduceOp, lists: Lists) -> list[list[torch.Tensor]]:
        """For each replica the reduced tensors, on the device of its own or any other."""
        raise NotImplementedError

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: Any
    ) -> Any:
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: Any
    ) -> list[Any]:
        del options
        by_replicas: dict[int, list[int]] = {}
        for position, (value, _) in enumerate(value_destination_pairs):
            by_replicas.setdefault(len(value.values), []).append(position)
        results: list[Any] = [None] * len(value_destination_pairs)
        for positions in by_replicas.values():
            columns = [value_destination_pairs[position][0].values for position in positions]
            reduced = self._reduce_lists(reduce_op, [list(own) for own in zip(*columns, strict=True)])
            for position, parts in zip(positions, zip(*reduced, strict=True), strict=True):
                results[position] = _put(parts, destination_devices(value_destination_pairs[position][1]))
        return results


class ReductionToOneDevice(_ListReduction):
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

    def _reduce_lists(self, op: ReduceOp, lists: Lists) -> list[list[torch.Tensor]]:
        if self._device is not None:
            lists = [[tensor.to(self._device) for tensor in tensors] for tensors in lists]
        if self._accumulate is None:
            return reduce_lists(op, lists)
        check_alike(lists)
        totals = []
        for column in zip(*lists, strict=True):
            dtype, device = result_dtype(op, column[0].dtype), column[0].device
            total = self._accumulate([tensor.to(device, dtype) for tensor in column])
            totals.append(total / len(lists) if op is ReduceOp.MEAN else total)
        return [totals] * len(lists)


class _PackedAllReduce(_ListReduction):
    """Reduces tensors in flat packs, each of one dtype."""

    _name = ""

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(
                f"{self._name} requires num_packs >= 0, but {num_packs} is specified. "
                f"Received: num_packs={num_packs}. Pass 0 to reduce each tensor alone."
            )
        self._num_packs = num_packs

    def _fits(self, lists: Lists) -> bool:
        """Whether the tensors sit where this way of reducing works."""
        raise NotImplementedError

    def _sum(self, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        """From one flat tensor per replica to their sum, on each one's device."""
        raise NotImplementedError

    def _reduce_lists(self, op: ReduceOp, lists: Lists) -> list[list[torch.Tensor]]:
        kept = all(tensor.dtype == result_dtype(op, tensor.dtype) for tensor in lists[0])
        check_alike(lists)
        sparse = any(tensor.is_sparse for tensors in lists for tensor in tensors)
        if sparse or not kept or not self._fits(lists):
            return reduce_lists(op, lists)
        results: list[list[Any]] = [[None] * len(lists[0]) for _ in lists]
        for positions in self._packs(lists[0]):
            flats = [torch.cat([tensors[i].reshape(-1) for i in positions]) for tensors in lists]
            for tensors, flat, result in zip(lists, self._sum(flats), results, strict=True):
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
            size = -(-len(positions) // self._num_packs) if self._num_packs else 1
            packs += [positions[start : start + size] for start in range(0, len(positions), size)]
        return packs


class NcclAllReduce(_PackedAllReduce):
    """Sums with NCCL, from GPU to GPU; the default for several GPUs.

    Tensors of one dtype travel in flat packs. Where the replicas do not sit on
    GPUs of their own, it adds up on one device instead.

    Args:
        num_packs: into how many packs the tensors of a dtype are put; 0 for each
            tensor alone.

    Raises:
        ValueError: if `num_packs` is negative.

    Example:

    >>> import keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(
    ...     ["cpu:0"], cross_device_ops=keras_distrib.NcclAllReduce(num_packs=2))
    """

    _name = "NCCL all-reduce"

    def _fits(self, lists: Lists) -> bool:
        devices = [tensors[0].device for tensors in lists]
        same_within = all(tensor.device == tensors[0].device for tensors in lists for tensor in tensors)
        return same_within and len(set(devices)) == len(devices) and all(device.type == "cuda" for device in devices)

    def _sum(self, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        nccl.all_reduce(flats)
        return flats


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """Sums within two halves of the replicas first, then over the halves.

    For machines whose GPUs form two groups, with slow links between the groups:
    only one sum of each group crosses them. Tensors of one dtype travel in flat
    packs.

    Args:
        num_packs: into how many packs the tensors of a dtype are put; 0 for each
            tensor alone.

    Raises:
        ValueError: if `num_packs` is negative.

    Example:

    >>> import keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(
    ...     ["cpu:0"], cross_device_ops=keras_distrib.HierarchicalCopyAllReduce())
    """

    _name = "HierarchicalCopy"

    def _fits(self, lists: Lists) -> bool:
        return all(tensor.device == tensors[0].device for tensors in lists for tensor in tensors)

    def _sum(self, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        half = -(-len(flats) // 2)
        groups = [group for group in (flats[:half], flats[half:]) if group]
        sums = [reduce_lists(ReduceOp.SUM, [[flat] for flat in group])[0][0] for group in groups]
        totals = [own for (own,) in reduce_lists(ReduceOp.SUM, [[total] for total in sums])]
        return [total.to(flat.device) for group, total in zip(groups, totals, strict=True) for flat in group]


def check_destinations(destinations: Any) -> None:
    """Raises unless a result can be put there.

    Raises:
        ValueError: for an empty name or another kind of object.
    """
    if isinstance(destinations, str) and not destinations:
        raise ValueError(f"destinations can not be empty. Received: destinations={destinations!r}. Name a device.")
    if not isinstance(destinations, str | DistributedValues | keras_seam.Variable | torch.Tensor):
        raise ValueError(
            "destinations must be one of a `DistributedValues` object, a tf.Variable object, or a device string. "
            f'Received: destinations={destinations!r}. Pass a name such as "cpu:0", or a variable.'
        )


def destination_devices(destinations: Any) -> list[torch.device]:
    """The devices that destinations stand for."""
    if isinstance(destinations, str):
        return [_devices.resolve(destinations).torch_device]
    if isinstance(destinations, torch.Tensor):
        return [destinations.device]
    found = components(destinations) or (destinations.value,)  # a plain variable
    return [part.device if isinstance(part, torch.Tensor) else torch.device("cpu") for part in found]


def _as_per_replica(value: Any) -> PerReplica:
    found = components(value)
    return PerReplica([keras_seam.convert_to_tensor(part).detach() for part in ((value,) if found is None else found)])


def _put(parts: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> Any:
    """The value that all parts hold, on each device: a part that is there already, or a copy."""
    by_device = {part.device: part for part in reversed(parts)}
    placed = [
        by_device.setdefault(device, parts[0].to(device)) if device not in by_device else by_device[device]
        for device in devices
    ]
    return placed[0] if len(placed) == 1 else Mirrored(placed)


def default_for(devices: Sequence[Device]) -> CrossDeviceOps:
    """NCCL for several GPUs, else a sum on the first device."""
    if len({device.torch_device for device in devices}) > 1 and all(device.kind == "gpu" for device in devices):
        return NcclAllReduce()
    return ReductionToOneDevice()

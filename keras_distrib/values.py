"""Values that differ by replica, and nested structures of them.

`PerReplica` holds one value per local replica, `Mirrored` one value on each
device. `select` picks a replica's side
of a nested structure before its function runs; `regroup` puts the replicas'
results together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


class DistributedValues:
    """Base class of values with one component per local replica.

    Attributes:
        values: tuple with one component per local replica, in replica order.

    Example:

    >>> import keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
    >>> value = strategy.experimental_distribute_values_from_function(lambda context: 5)
    >>> isinstance(value, keras_distrib.DistributedValues), value.values
    (True, (5,))
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        return self._values

    def __repr__(self) -> str:
        lines = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(self._values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"


class PerReplica(DistributedValues):
    """One value per replica, such as a batch's parts or a step's losses.

    `rows` is set on batches that a strategy split or counted, and on the
    results of a step that was run on one: the rows of each replica. A replica
    with 0 rows does not run the step; its component of a result is an empty
    stand-in that reductions and gathers leave out.

    Example:

    >>> from keras_distrib.values import PerReplica
    >>> PerReplica([1, 2]).values
    (1, 2)
    """

    def __init__(self, values: Sequence[Any], rows: Sequence[int] | None = None) -> None:
        super().__init__(values)
        self.rows = None if rows is None else tuple(rows)

    @property
    def active_values(self) -> tuple[Any, ...]:
        """The components of the replicas that have rows."""
        if self.rows is None or not any(self.rows):
            return self._values
        return tuple(value for value, rows in zip(self._values, self.rows, strict=True) if rows > 0)


class Mirrored(DistributedValues):
    """The same value on every replica's device, such as the result of a reduction.

    Example:

    >>> import torch, keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
    >>> strategy.extended.reduce_to("SUM", torch.tensor(1.0), "cpu:0")
    tensor(1.)
    """


def is_namedtuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def map_structure(fn: Callable[[Any], Any], structure: Any) -> Any:
    """Applies `fn` to the leaves of lists, tuples, namedtuples and dicts."""
    if isinstance(structure, dict):
        return _like_dict(structure, {key: map_structure(fn, value) for key, value in structure.items()})
    if is_namedtuple(structure):
        return type(structure)(*(map_structure(fn, value) for value in structure))
    if isinstance(structure, list | tuple):
        return _like_sequence(structure, [map_structure(fn, value) for value in structure])
    return fn(structure)


def leaves(structure: Any) -> Iterator[Any]:
    """The leaves of a nested structure, in order."""
    if isinstance(structure, dict):
        for value in structure.values():
            yield from leaves(value)
    elif isinstance(structure, list | tuple):
        for value in structure:
            yield from leaves(value)
    else:
        yield structure


def pack_like(structure: Any, flat: Sequence[Any]) -> Any:
    """Puts leaves back into the shape of `structure`."""
    remaining = iter(flat)
    return map_structure(lambda _: next(remaining), structure)


def select(index: int, structure: Any) -> Any:
    """The side of local replica `index` of a nested structure.

    Leaves that are not distributed, distributed variables included, go whole to
    every replica.
    """

    def pick(leaf: Any) -> Any:
        return leaf.values[index] if isinstance(leaf, DistributedValues) else leaf

    return map_structure(pick, structure)


def components(value: Any) -> tuple[Any, ...] | None:
    """What a per-replica value or a distributed variable holds, one for each replica that counts.

    None if the value is the same for all replicas.
    """
    if isinstance(value, PerReplica):
        return value.active_values
    if isinstance(value, DistributedValues):
        return value.values
    return getattr(value, "stored", None)


def detached(structure: Any) -> Any:
    """The structure with tensors that carry no graph of the step that made them."""

    def detach(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            return PerReplica([detach(value) for value in leaf.values], leaf.rows)
        return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf

    return map_structure(detach, structure)


def row_counts(structure: Any) -> list[tuple[int, ...]]:
    """The different rows per replica of the counted batches in a structure."""
    found = (leaf.rows for leaf in leaves(structure) if isinstance(leaf, PerReplica) and leaf.rows is not None)
    return list(dict.fromkeys(found))


def regroup(
    structures: Sequence[Any], active: Sequence[int], num_replicas: int, rows: Sequence[int] | None = None
) -> Any:
    """Groups the replicas' results leaf by leaf.

    Args:
        structures: one result per replica that ran, in the order of `active`.
        active: local indices of the replicas that ran.
        num_replicas: how many local replicas there are.
        rows: rows per replica of the batch that was run, if counted.

    Returns:
        The common structure; a leaf is the bare object where all replicas
        returned the same one, else a `PerReplica`.

    Raises:
        ValueError: if the replicas returned different structures.
    """
    first = structures[0]
    if isinstance(first, dict):
        _check_alike(structures, [set(s) if isinstance(s, dict) else None for s in structures], "keys")
        return _like_dict(
            first, {key: regroup([s[key] for s in structures], active, num_replicas, rows) for key in first}
        )
    if isinstance(first, list | tuple):
        lengths = [len(s) if isinstance(s, list | tuple) else None for s in structures]
        _check_alike(structures, lengths, "lengths")
        parts = [regroup([s[i] for s in structures], active, num_replicas, rows) for i in range(len(first))]
        return type(first)(*parts) if is_namedtuple(first) else _like_sequence(first, parts)
    # The only replica that ran says nothing about the others: its tensors stay per-replica.
    alone = len(active) == 1 < num_replicas and isinstance(first, torch.Tensor)
    if not alone and all(structure is first for structure in structures):
        return first
    components: list[Any] = [None] * num_replicas
    for index, structure in zip(active, structures, strict=True):
        components[index] = structure
    for index in set(range(num_replicas)) - set(active):
        components[index] = _empty_like(first)
    return PerReplica(components, rows)


def _check_alike(structures: Sequence[Any], shapes: Sequence[Any], what: str) -> None:
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"All replicas must return the same structure, but their {what} differ. "
            f"Received: {what} by replica={list(shapes)}. Return the same keys and lengths on every replica."
        )


def _like_sequence(original: Any, parts: list[Any]) -> Any:
    return tuple(parts) if isinstance(original, torch.Size) else type(original)(parts)


def _like_dict(original: dict[Any, Any], items: dict[Any, Any]) -> Any:
    return items if type(original) is dict else _rebuild_dict(original, items)


def _rebuild_dict(original: dict[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(original)(items)
    except TypeError:  # such as a defaultdict, whose first argument is a factory
        return items


def _empty_like(value: Any) -> Any:
    """The stand-in for a replica that did not run: no rows, or zero."""
    if isinstance(value, torch.Tensor):
        return value.new_zeros((0, *value.shape[1:]) if value.ndim else ())
    return None

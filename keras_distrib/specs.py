"""What shapes and dtypes a batch has, and what a function accepts.

A *spec* describes a tensor (`TensorSpec`) or a per-replica value
(`PerReplicaSpec`, one spec for each replica); nested structures of specs describe
nested structures of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch

from keras_distrib import keras_seam
from keras_distrib.values import DistributedValues, is_namedtuple, map_structure

Shape = tuple[int | None, ...] | None


@dataclass(frozen=True, init=False, repr=False)
class TensorSpec:
    """The shape and dtype of a tensor.

    Args:
        shape: a sequence of lengths, None for an axis of any length; None for any
            shape.
        dtype: a dtype's name, or a torch or NumPy dtype.
        name: a name, for messages.

    Raises:
        ValueError: for a negative length or an unknown dtype.
        TypeError: for a length that is no integer.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.TensorSpec([None, 2], "float32")
    TensorSpec(shape=(None, 2), dtype='float32', name=None)
    """

    shape: Shape
    dtype: str
    name: str | None

    def __init__(self, shape: Sequence[int | None] | None, dtype: Any = "float32", name: str | None = None) -> None:
        object.__setattr__(self, "shape", None if shape is None else tuple(_length(length, shape) for length in shape))
        object.__setattr__(self, "dtype", "string" if dtype == "string" else keras.backend.standardize_dtype(dtype))
        object.__setattr__(self, "name", name)

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype!r}, name={self.name!r})"

    @classmethod
    def of(cls, tensor: Any, shape: Shape = None) -> TensorSpec:
        """The spec of a tensor; `shape` replaces its own."""
        return cls(tuple(tensor.shape) if shape is None else shape, tensor.dtype)

    def is_compatible_with(self, tensor: Any) -> bool:
        """Whether a tensor has this dtype, and a shape that fits."""
        fits = self.shape is None or (
            len(self.shape) == len(tensor.shape)
            and all(mine in (None, theirs) for mine, theirs in zip(self.shape, tensor.shape, strict=True))
        )
        return fits and keras.backend.standardize_dtype(tensor.dtype) == self.dtype


@dataclass(frozen=True, init=False, repr=False)
class PerReplicaSpec:
    """The specs of a per-replica value, one for each local replica.

    Example:

    >>> import keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(["cpu:0", "cpu:0"][:1])
    >>> PerReplicaSpec(keras_distrib.TensorSpec([None]), keras_distrib.TensorSpec([None])).specs[1].shape
    (None,)
    """

    specs: tuple[TensorSpec, ...]

    def __init__(self, *specs: TensorSpec) -> None:
        object.__setattr__(self, "specs", specs)

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.specs))})"


def _length(length: Any, shape: Any) -> int | None:
    if length is None:
        return None
    if isinstance(length, bool) or not isinstance(length, int | np.integer):
        raise TypeError(f"`shape` must hold integers and None. Received: shape={shape!r}")
    if length < 0:
        raise ValueError(f"`shape` must not hold negative lengths; None means any. Received: shape={shape!r}")
    return int(length)


def is_spec(value: Any) -> bool:
    return isinstance(value, TensorSpec | PerReplicaSpec)


def conform(spec: Any, value: Any, where: str) -> Any:
    """The value as the spec describes it: numbers, lists and arrays become tensors.

    Args:
        spec: a spec, or a nested structure of them.
        value: what is to fit it.
        where: what the value is, for messages.

    Returns:
        The structure of `spec` with values that fit.

    Raises:
        TypeError: where the value does not fit.
    """
    if isinstance(spec, dict):
        if not isinstance(value, dict) or set(value) != set(spec):
            found = list(value) if isinstance(value, dict) else type(value).__name__
            raise TypeError(f"{where} must be a dict with the keys {list(spec)}. Received: {found}")
        return {key: conform(spec[key], value[key], f"{where}[{key!r}]") for key in spec}
    if isinstance(spec, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(spec):
            found = f"{len(value)} parts" if isinstance(value, list | tuple) else type(value).__name__
            raise TypeError(f"{where} must be a sequence of {len(spec)} parts. Received: {found}")
        parts = [conform(s, v, f"{where}[{i}]") for i, (s, v) in enumerate(zip(spec, value, strict=True))]
        return type(value)(*parts) if is_namedtuple(value) else type(value)(parts)
    if isinstance(spec, PerReplicaSpec):
        return _conform_per_replica(spec, value, where)
    return _conform_tensor(spec, value, where)


def _conform_per_replica(spec: PerReplicaSpec, value: Any, where: str) -> Any:
    if not isinstance(value, DistributedValues) or len(value.values) != len(spec.specs):
        raise TypeError(
            f"{where} must be a per-replica value of {len(spec.specs)} replicas, such as an element of a distributed "
            f"dataset. Received: {value!r}"
        )
    for index, (part_spec, part) in enumerate(zip(spec.specs, value.values, strict=True)):
        _conform_tensor(part_spec, part, f"{where}, replica {index},")
    return value


def _conform_tensor(spec: TensorSpec, value: Any, where: str) -> Any:
    if isinstance(value, keras_seam.Variable):
        value = value.value
    if not isinstance(value, torch.Tensor):
        if spec.dtype == "string" and isinstance(value, str | bytes):
            return value
        value = _as_tensor(spec, value, where)
    if not spec.is_compatible_with(value):
        raise TypeError(
            f"{where}: Can not cast {TensorSpec.of(value)} to {spec}. "
            f"Received: a tensor of shape {tuple(value.shape)} and dtype {value.dtype}."
        )
    return value


def _as_tensor(spec: TensorSpec, value: Any, where: str) -> torch.Tensor:
    try:
        return keras_seam.convert_to_tensor(value, dtype=spec.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{where}: cannot convert {value!r} to a tensor of dtype {spec.dtype}.") from error


def batch_spec(structure: Any, num_rows: Any = None) -> Any:
    """The specs of a batch whose number of rows may vary.

    Args:
        structure: a nested structure of tensors and per-replica values.
        num_rows: the rows that all batches have, or None.
    """

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues):
            return PerReplicaSpec(*(spec(value) for value in leaf.values))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return TensorSpec.of(leaf, (num_rows, *leaf.shape[1:]) if leaf.ndim else ())

    return map_structure(spec, structure)

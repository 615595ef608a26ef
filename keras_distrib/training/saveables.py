"""The state of what a checkpoint holds, as flat entries with stable names.

A *part* is one object with state of its own: a Keras saveable (layer, optimizer,
metric), a variable, or an object with `state_dict` or `get_state`. `parts` finds
them in an object, by the attributes that lead there, as Keras' own saving does.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import torch

from keras_distrib import keras_seam


class Part:
    """One object's state; the entries' names begin with `path`.

    Attributes:
        path: names that lead to the object, joined by `/`.
        owner: the object.
    """

    def __init__(self, path: str, owner: Any) -> None:
        self.path = path
        self.owner = owner

    @property
    def is_built(self) -> bool:
        """Whether all the state that the object will have is there."""
        return True

    def collect(self) -> dict[str, Any]:
        """The state: entries of tensors, or of bytes."""
        raise NotImplementedError

    def load(self, entries: dict[str, Any]) -> None:
        """Sets the state from entries that `collect` gave."""
        raise NotImplementedError

    def check(self, entries: dict[str, Any]) -> None:
        """Raises unless the entries fit.

        Raises:
            ValueError: for other names or shapes.
        """
        own = self.collect()
        shapes = [{name: _shape(value) for name, value in side.items()} for side in (own, entries)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"The checkpoint does not fit {self.path.removeprefix('/')!r}, a {type(self.owner).__name__}. "
                f"Received: shapes in the checkpoint={shapes[1]}, shapes here={shapes[0]}. "
                "Restore into objects that are made as those that were saved."
            )


class SaveablePart(Part):
    """A Keras layer, model or optimizer: what its `save_own_variables` gives."""

    @property
    def is_built(self) -> bool:
        return bool(getattr(self.owner, "built", True))

    def collect(self) -> dict[str, Any]:
        store: dict[str, Any] = {}
        self.owner.save_own_variables(store)
        return {name: _as_tensor(value) for name, value in store.items()}

    def load(self, entries: dict[str, Any]) -> None:
        if entries:
            self.owner.load_own_variables(entries)


class MetricPart(Part):
    """A metric's variables, which Keras' own files leave out."""

    def collect(self) -> dict[str, Any]:
        return {str(index): _as_tensor(variable) for index, variable in enumerate(self.owner._variables)}

    def load(self, entries: dict[str, Any]) -> None:
        for index, variable in enumerate(self.owner._variables):
            variable.assign(entries[str(index)])


class VariablePart(Part):
    """A variable that no layer owns, or a seed generator's state."""

    def collect(self) -> dict[str, Any]:
        return {"value": _as_tensor(self.owner)}

    def load(self, entries: dict[str, Any]) -> None:
        self.owner.assign(entries["value"])


class StatefulPart(Part):
    """An object that gives and takes its whole state, such as an iterator."""

    def collect(self) -> dict[str, Any]:
        state = self.owner.get_state() if hasattr(self.owner, "get_state") else self.owner.state_dict()
        return {"state": pickle.dumps(state)}

    def load(self, entries: dict[str, Any]) -> None:
        state = pickle.loads(entries["state"])  # noqa: S301 - torch's own format trusts the file likewise
        if hasattr(self.owner, "set_state"):
            self.owner.set_state(state)
        else:
            self.owner.load_state_dict(state)


def parts(owner: Any, path: str, seen: set[int] | None = None) -> Iterator[Part]:
    """The parts of an object, those within it included, each once.

    Raises:
        TypeError: if the object has no state that could be saved.
    """
    seen = set() if seen is None else seen
    if keras_seam.is_saveable(owner):
        yield from _saveable_parts(owner, path, seen)
    elif id(owner) in seen:
        return
    elif isinstance(owner, dict | list | tuple):
        items = owner.items() if isinstance(owner, dict) else enumerate(owner)
        for name, value in items:
            yield from parts(value, f"{path}/{name}", seen)
    elif isinstance(owner, keras_seam.Variable):
        seen.add(id(owner))
        yield VariablePart(path, owner)
    elif keras_seam.is_seed_generator(owner):
        yield from parts(owner.state, path, seen)
    elif hasattr(owner, "tracked_objects"):  # another checkpoint
        yield from parts(owner.tracked_objects(), path, seen)
    elif _is_stateful(owner):
        seen.add(id(owner))
        yield StatefulPart(path, owner)
    else:
        raise TypeError(
            "A checkpoint holds Keras models, layers, optimizers, metrics and variables, and objects with "
            f"`state_dict`/`load_state_dict` or `get_state`/`set_state`. Received: {path}={owner!r} (of type "
            f"{type(owner).__name__}). Keep a number in a `keras.Variable`."
        )


def _saveable_parts(owner: Any, path: str, seen: set[int]) -> Iterator[Part]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if hasattr(owner, "save_own_variables"):
        yield SaveablePart(path, owner)
    elif isinstance(owner, keras.metrics.Metric):
        yield MetricPart(path, owner)
    for index, generator in enumerate(getattr(owner, "_seed_generators", ())):
        yield from parts(generator, f"{path}/seed_generator_{index}", seen)
    for name, child in keras_seam.saveable_children(owner):
        yield from _saveable_parts(child, f"{path}/{name}", seen)


def _is_stateful(owner: Any) -> bool:
    pairs = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
    return any(all(callable(getattr(owner, name, None)) for name in pair) for pair in pairs)


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, keras_seam.Variable):
        value = value.value
    if isinstance(value, np.ndarray | np.generic):
        value = keras_seam.tensor_of_array(value)
    return torch.as_tensor(value).detach().cpu()


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None

"""What a captured step took as constant, and whether that still holds.

While a step is observed or traced, the plain values are noted that it reads from
attributes of Keras objects, from globals and closures of functions that are neither
Keras' nor torch's, and from attributes of the objects that these are given. Before each
replay the same places are looked at again. A value that has changed when the
observed step ends is a side effect, which a replay would not have.
"""

from __future__ import annotations

import contextlib
import gc
import io
import random
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch._subclasses.fake_tensor import FakeTensor

from keras_distrib import keras_seam

_MISSING = object()
_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, tuple)
_MOST_GUARDS = 200_000
_DEPTH = 3
_CALLS_WITH_EFFECTS = {"print": "prints", "input": "reads input", "open": "opens a file"}
_MODULES_WITH_EFFECTS = {"time": "asks for the time", "posix": "calls the operating system", "_socket": "uses a socket"}
_ENTERED_WITH_EFFECTS = {
    "logging": "writes to a log",
    "threading": "waits for another thread",
    "queue": "uses a queue",
    "subprocess": "starts a process",
    "socket": "uses a socket",
}


class Guards:
    """Places with the values that a captured step found there.

    Args:
        places: `(mapping, name, value, snapshot)`; a snapshot is a copy of a container.
        cells: `(cell, value, snapshot)` of closures.
        variables: the variables of the step, whose `trainable` is constant too.
    """

    def __init__(
        self,
        places: list[tuple[Any, str, Any, Any]],
        cells: list[tuple[Any, Any, Any]],
        variables: Sequence[Any],
    ) -> None:
        self._variables = [(variable, variable.trainable) for variable in variables]
        self._plain = [(mapping, name, value) for mapping, name, value, copy in places if copy is _MISSING]
        self._containers = [place for place in places if place[3] is not _MISSING]
        self._cells = cells

    def hold(self) -> bool:
        """Whether all values are what they were."""
        for variable, trainable in self._variables:
            if variable._trainable is not trainable or variable._value._backward_hooks:
                return False
        missing = _MISSING
        for mapping, name, value in self._plain:
            current = mapping.get(name, missing)
            if current is not value and not _equal(current, value):
                return False
        for mapping, name, value, copy in self._containers:
            if _changed(mapping.get(name, missing), value, copy):
                return False
        return not any(_changed(_contents(cell), value, copy) for cell, value, copy in self._cells)


def _equal(current: Any, value: Any) -> bool:
    return type(current) is type(value) and isinstance(value, _SIMPLE) and current == value


def _changed(current: Any, value: Any, copy: Any) -> bool:
    if current is not value:
        return not (_equal(current, value) if copy is _MISSING else _same(current, copy))
    return copy is not _MISSING and not _same(current, copy)


def _same(current: Any, copy: Any) -> bool:
    """Whether a container holds what it held."""
    if isinstance(copy, np.ndarray):
        return isinstance(current, np.ndarray) and np.array_equal(current, copy)
    if isinstance(current, dict):
        if not isinstance(copy, dict) or len(current) != len(copy):
            return False
        return all(_alike(current.get(key, _MISSING), value) for key, value in copy.items())
    if isinstance(current, set):
        return current == copy
    if not isinstance(current, list | tuple) or not isinstance(copy, list | tuple) or len(current) != len(copy):
        return False
    return all(own is other or _alike(own, other) for own, other in zip(current, copy, strict=True))


def _alike(current: Any, value: Any) -> bool:
    return current is value or _equal(current, value)


def _snapshot(value: Any) -> Any:
    """A copy of what can be changed in place, as deep as one container."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, np.ndarray) and value.nbytes <= 1 << 20:
        return value.copy()
    return _MISSING


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


class Observer:
    """Notes what a step reads and does besides computing, in the calling thread."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], tuple[Any, str, Any, Any, str]] = {}
        self._cells: list[tuple[types.CellType, Any, Any, str]] = []
        self._objects: set[int] = set()
        self._kept: list[Any] = []
        self._codes: set[types.CodeType] = set()
        self._effects: list[str] = []
        self._thread = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observes what runs inside."""
        outer = sys.getprofile()
        states = random.getstate(), _numpy_state()
        self._thread = threading.get_ident()
        try:
            with keras_seam.reading_attributes(self._read), keras_seam.setting_attributes(self._set):
                sys.setprofile(self._profile)
                try:
                    yield
                finally:
                    sys.setprofile(outer)
        finally:
            if (random.getstate(), _numpy_state()) != states:
                self._effects.append("it draws from Python's or NumPy's random numbers")

    def side_effect(self) -> str | None:
        """What the step did that a replay would not do, in words; None if nothing was seen."""
        if self._effects:
            return self._effects[0]
        for mapping, name, value, copy, owner in self._places.values():
            if not _changed(mapping.get(name, _MISSING), value, copy):
                continue
            if not owner.startswith("Keras ") or not name.startswith("_"):
                return f"it changes `{name}` of {owner}"
        for cell, value, copy, name in self._cells:
            if _changed(_contents(cell), value, copy):
                return f"it changes the variable `{name}` of an enclosing function"
        return None

    def guards(self, variables: Sequence[Any]) -> Guards:
        """What has to hold for the step, which touches these variables, to be replayed."""
        places = [
            (mapping, name, value, copy)
            for mapping, name, value, copy, _ in self._places.values()
            if not _changed(mapping.get(name, _MISSING), value, copy)
        ]
        return Guards(places, [(cell, value, copy) for cell, value, copy, _ in self._cells], variables)

    def _note(self, mapping: Any, name: str, value: Any, owner: str, depth: int = 0) -> None:
        key = (id(mapping), name)
        if key in self._places or len(self._places) >= _MOST_GUARDS or isinstance(value, FakeTensor):
            return
        self._places[key] = (mapping, name, value, _snapshot(value), owner)
        self._note_object(value, depth)

    def _note_object(self, value: Any, depth: int) -> None:
        """The attributes of an object of a class that is neither Keras', torch's nor Python's."""
        if isinstance(value, _SIMPLE) or id(value) in self._objects or depth >= _DEPTH:
            return
        if isinstance(value, _CONTAINERS):
            self._objects.add(id(value))
            self._kept.append(value)
            for inner in list(value.values()) if isinstance(value, dict) else list(value):
                self._note_object(inner, depth + 1)
            return
        cls = type(value)
        if isinstance(value, type | types.ModuleType | types.FunctionType) or not _is_users(cls.__module__):
            return
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or keras_seam.is_observed(value):
            return
        self._objects.add(id(value))
        self._kept.append(value)
        for name, inner in list(attributes.items()):
            self._note(attributes, name, inner, f"a {cls.__name__}", depth + 1)

    def _read(self, owner: Any, mapping: Any, name: str, value: Any) -> None:
        """A Keras object's attribute was read."""
        if threading.get_ident() == self._thread:
            self._note(mapping, name, value, f"Keras {type(owner).__name__}")

    def _set(self, owner: Any, name: str) -> None:
        """Other code than Keras' set an attribute of a layer."""
        if threading.get_ident() == self._thread:
            self._effects.append(f"it sets the attribute `{name}` of a {type(owner).__name__}")

    def _profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if frame.f_code not in self._codes:
                self._codes.add(frame.f_code)
                self._enter(frame)
        elif event == "c_call":
            module = frame.f_globals.get("__name__", "")
            if _is_users(module):
                self._call(argument)

    def _enter(self, frame: types.FrameType) -> None:
        module = frame.f_globals.get("__name__", "")
        what = _ENTERED_WITH_EFFECTS.get(module)
        if what is not None and frame.f_back is not None and _is_users(frame.f_back.f_globals.get("__name__", "")):
            if not _is_aside(frame.f_back):
                self._effects.append(f"it {what}")
            return
        if not _is_users(module) or _is_aside(frame):
            return
        code = frame.f_code
        for name in code.co_names:
            if name in frame.f_globals:
                self._note(frame.f_globals, name, frame.f_globals[name], f"the module {module}")
        own = frame.f_locals
        if code.co_freevars:
            self._note_cells(code, own)
        for value in own.values():
            self._note_object(value, 0)

    def _note_cells(self, code: types.CodeType, values: dict[str, Any]) -> None:
        """The closure of a function that was entered: of those with its code, the one that holds these values."""
        for function in gc.get_referrers(code):
            if not isinstance(function, types.FunctionType) or function.__code__ is not code:
                continue
            cells = list(zip(code.co_freevars, function.__closure__ or (), strict=True))
            if all(_contents(cell) is values.get(name, _MISSING) for name, cell in cells):
                for name, cell in cells:
                    value = _contents(cell)
                    self._cells.append((cell, value, _snapshot(value), name))

    def _call(self, called: Any) -> None:
        name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
        what = None
        if isinstance(owner, types.ModuleType):
            what = _CALLS_WITH_EFFECTS.get(name) if owner.__name__ in ("builtins", "io", "_io") else None
            what = what or _MODULES_WITH_EFFECTS.get(owner.__name__)
        elif isinstance(owner, np.random.Generator | np.random.RandomState | random.Random):
            what = "draws random numbers outside of Keras"
        elif isinstance(owner, io.IOBase):
            what = "writes to, or reads from, a file"
        if what is not None:
            self._effects.append(f"it {what} (`{name}`)")


def _is_aside(frame: types.FrameType | None) -> bool:
    """Whether a frame belongs to what handles a library's log messages or imports."""
    while frame is not None:
        if frame.f_globals.get("__name__") in ("logging", "importlib._bootstrap"):
            return True
        frame = frame.f_back
    return False


def _is_users(module: str) -> bool:
    return not keras_seam.is_library(module) and module.split(".")[0] not in sys.stdlib_module_names


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return name, keys.tobytes(), *rest  # pyright: ignore[reportAttributeAccessIssue]

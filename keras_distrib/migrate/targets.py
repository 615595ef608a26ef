"""What a name of TensorFlow becomes, and whether that exists.

A *verdict* on a name: `New` text, `Kept` as TensorFlow's, `Removed`, or
`Missing` with a reason.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.resources
import inspect
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from keras_distrib.migrate import rules


@dataclass(frozen=True)
class New:
    """The text that takes a name's place; `op` if its arguments change too."""

    text: str
    op: rules.Op | None = None

    @property
    def is_literal(self) -> bool:
        return self.text.startswith('"')


@dataclass(frozen=True)
class Kept:
    """The name stays TensorFlow's."""


@dataclass(frozen=True)
class Removed:
    """The statement that calls it is taken out."""

    why: str


@dataclass(frozen=True)
class Missing:
    """No counterpart, for a reason."""

    reason: str


Verdict = New | Kept | Removed | Missing


def longest_prefix(name: str, table: Iterable[str]) -> str | None:
    """The longest entry of a table that is the name or a module it is in."""
    return max((key for key in table if name == key or name.startswith(key + ".")), key=len, default=None)


@functools.cache
def target(name: str) -> Any:
    """The object of a dotted name of keras, keras_distrib, torch or the builtins.

    Raises:
        LookupError: if there is none.
    """
    root, *rest = name.split(".")
    if not rest and hasattr(builtins, root):
        return getattr(builtins, root)
    found = importlib.import_module(root)
    for part in rest:
        if not hasattr(found, part):
            raise LookupError(name)
        found = getattr(found, part)
    return found


def exists(name: str) -> bool:
    try:
        target(name)
    except LookupError:
        return False
    return True


@functools.cache
def parameters(name: str) -> tuple[inspect.Parameter, ...] | None:
    """The parameters of a callable, a class' those of its whole family; None if not known."""
    found = target(name)
    if not inspect.isclass(found):
        try:
            return tuple(inspect.signature(found).parameters.values())
        except (TypeError, ValueError):
            return None
    collected: dict[str, inspect.Parameter] = {}
    owners = [cls for cls in found.__mro__[:-1] if "__init__" in vars(cls)]
    if not owners:
        return None
    for cls in owners:
        own = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
        for parameter in own:
            collected.setdefault(parameter.name, parameter)
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in own):
            break
    return tuple(collected.values())


@functools.cache
def _not_offered() -> dict[str, str]:
    """Reasons that the package itself gives for names it leaves out."""
    file = importlib.resources.files("keras_distrib") / "not_offered.toml"
    if not file.is_file():
        return {}
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    reasons = {name: f"not yet: {reason}" for name, reason in tables.get("not_yet", {}).items()}
    return reasons | tables.get("not_offered", {})


def why_missing(name: str) -> str:
    """The reason why a name has no counterpart."""
    own = longest_prefix(f"tf.{name}", _not_offered())
    if own is not None:
        return _not_offered()[own]
    key = longest_prefix(name, rules.REASONS)
    if key is not None:
        return rules.REASONS[key]
    return rules.NO_REASON


def why_no_method(method: str) -> str | None:
    """The reason why a strategy lacks a method, if it does."""
    return _not_offered().get(f"Strategy.{method}")


def module_name(name: str) -> str | None:
    """The new name of a module, class or function that an import or assignment binds."""
    if name in rules.BACKEND:
        return rules.BACKEND[name]
    if name in rules.OPS:
        new = rules.OPS[name].target
        return new if "." in new and name != "range" else None
    key = longest_prefix(name, rules.PREFIXES)
    if key is None:
        return None
    new = rules.PREFIXES[key] + name[len(key) :]
    return new if exists(new) else None


def judge(name: str, in_pipeline: bool) -> Verdict:
    """What a name becomes."""
    # tf.keras is Keras 3 itself, in a pipeline too.
    if in_pipeline and longest_prefix(name, ("keras", "distribute")) is None:
        return Kept()
    if name in rules.VALUES:
        return New(rules.VALUES[name])
    if name in rules.OPS:
        return New(rules.OPS[name].target, rules.OPS[name])
    if name in rules.REMOVED:
        return Removed(rules.REMOVED[name])
    if longest_prefix(name, rules.KEPT) is not None:
        return Kept()
    new = module_name(name)
    return New(new) if new is not None else Missing(why_missing(name))

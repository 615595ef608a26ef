"""What to say of tf.distribute's names that are not here."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib


@functools.cache
def reasons() -> dict[str, str]:
    """Each name of `not_offered.toml` and why it is missing."""
    text = (importlib.resources.files("keras_distrib") / "not_offered.toml").read_text(encoding="utf-8")
    listed = tomllib.loads(text)
    offered = {name: f"is not offered: {reason}" for name, reason in listed["not_offered"].items()}
    return offered | {name: f"is not here yet: it {reason}" for name, reason in listed["not_yet"].items()}


def error(key: str, shown: str, otherwise: str) -> AttributeError:
    """The error for a name: the reason that is listed under `key`, or the usual text."""
    reason = reasons().get(key)
    return AttributeError(otherwise if reason is None else f"{shown} {reason}")

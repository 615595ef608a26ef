"""Which parts of a script belong to a `tf.data` pipeline, and so stay TensorFlow's.

They are the arguments of `tf.data`'s functions and of a dataset's methods, and
the functions of the script that are given to them, with those that these call.
A script is read by itself: functions that another file gives to a pipeline are
not known, and are moved as any others.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import libcst as cst

from keras_distrib.migrate import rules
from keras_distrib.migrate.names import Names, dotted
from keras_distrib.migrate.targets import longest_prefix

_NO_DATASETS = ("pool", "executor")


def is_pipeline_call(names: Names, call: cst.Call) -> bool:
    """Whether the arguments of a call belong to a pipeline."""
    reference = names.resolve(call.func)
    if reference is not None:
        return longest_prefix(reference.name, ("data",)) is not None
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in rules.DATASET_METHODS:
        return False
    receiver = (dotted(call.func.value) or "").lower()
    return not receiver.endswith(_NO_DATASETS)


class _Functions(cst.CSTVisitor):
    """Collects the script's functions by name, and those named in pipelines."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self.by_name: dict[str, list[cst.FunctionDef]] = defaultdict(list)
        self.called: list[cst.CSTNode] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.by_name[node.name.value].append(node)

    def visit_Call(self, node: cst.Call) -> None:
        if is_pipeline_call(self._names, node):
            self.called.extend(node.args)


class _Mentions(cst.CSTVisitor):
    """Collects the names that an expression or function mentions."""

    def __init__(self) -> None:
        self.names: list[cst.Name] = []
        self.methods: list[str] = []

    def visit_Name(self, node: cst.Name) -> None:
        self.names.append(node)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if isinstance(node.value, cst.Name) and node.value.value in ("self", "cls"):
            self.methods.append(node.attr.value)
        node.value.visit(self)
        return False


def functions_in_pipelines(module: cst.Module, names: Names) -> set[cst.FunctionDef]:
    """The functions of a script that run in a pipeline."""
    functions = _Functions(names)
    module.visit(functions)
    found: set[cst.FunctionDef] = set()
    waiting: list[Any] = list(functions.called)
    while waiting:
        mentions = _Mentions()
        waiting.pop().visit(mentions)
        new = [function for name in mentions.methods for function in functions.by_name[name]]
        for name in mentions.names:
            scope = names.scopes.get(name)
            assignments = scope[name.value] if scope is not None else ()
            new += [a.node for a in assignments if isinstance(getattr(a, "node", None), cst.FunctionDef)]
        unseen = set(new) - found
        waiting += unseen
        found |= unseen
    return found

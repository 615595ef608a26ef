"""Which names of a script are TensorFlow's.

A *binding* is a local name for something of TensorFlow: made by an import, or
by an assignment such as `layers = tf.keras.layers`. A *reference* is a dotted
expression that starts with a binding. Scopes decide: a parameter or another
assignment of the same name hides a binding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import metadata

from keras_distrib.migrate import rules

ROOT = "tensorflow"
ImportStatement = cst.Import | cst.ImportFrom


@dataclass(eq=False)
class Binding:
    """A local name for something of TensorFlow.

    Attributes:
        local: the name in the script.
        full: what it is, such as `tensorflow.keras.layers`.
        by_import: whether an import makes it, else an assignment.
        stays: how many references remain TensorFlow's.
        through: how many keep their text, as the binding gets its new meaning.
        moved: how many are written with their new name in full.
    """

    local: str
    full: str
    by_import: bool
    stays: int = 0
    through: int = 0
    moved: int = 0

    @property
    def name(self) -> str:
        """What it is, without the leading `tensorflow.`; empty for TensorFlow itself."""
        return self.full.removeprefix(ROOT).removeprefix(".")


@dataclass(frozen=True)
class Reference:
    """A dotted expression that is TensorFlow's.

    Attributes:
        node: the expression.
        text: as it is written.
        name: without the leading `tensorflow.`.
        tail: what follows the binding, with its dot.
        bindings: the one it has, or several that it may have.
    """

    node: cst.Name | cst.Attribute
    text: str
    name: str
    tail: str
    bindings: tuple[Binding, ...]
    is_sure: bool = True


def dotted(node: cst.CSTNode | None) -> str | None:
    """The text of a dotted name, or None for another expression."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        front = dotted(node.value)
        return front and f"{front}.{node.attr.value}"
    return None


def first_name(node: cst.CSTNode) -> cst.Name | None:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None


def is_tensorflow(full: str) -> bool:
    return full == ROOT or full.startswith(ROOT + ".")


def aliases(statement: ImportStatement) -> list[cst.ImportAlias]:
    return [] if isinstance(statement.names, cst.ImportStar) else list(statement.names)


def module_of(statement: ImportStatement) -> str:
    """The module that `from module import ...` names; empty for a plain import."""
    if isinstance(statement, cst.Import):
        return ""
    return "." * len(statement.relative) + (dotted(statement.module) or "")


def modules_of(statement: ImportStatement) -> list[str]:
    """The full names that an import binds; the module for `import *`."""
    if isinstance(statement.names, cst.ImportStar):
        return [module_of(statement)]
    return [imported(statement, alias)[1] for alias in aliases(statement)]


def imported(statement: ImportStatement, alias: cst.ImportAlias) -> tuple[str, str]:
    """The local name and the full one of what an import binds: `import a.b` binds a."""
    name = dotted(alias.name) or ""
    if isinstance(statement, cst.ImportFrom):
        local, full = name, f"{module_of(statement)}.{name}"
    elif alias.asname is None:
        local = full = name.split(".")[0]
    else:
        local = full = name
    if alias.asname is not None:
        local = dotted(alias.asname.name) or local
    return local, full


def grouped(imports: list[str]) -> list[str]:
    """Joins imports from one module: `from keras import layers, models`."""
    joined: dict[str, list[str]] = {}
    for text in imports:
        front, _, name = text.rpartition("import ")
        joined.setdefault(front if front else text, []).append(name)
    return [
        f"{front}import {', '.join(names)}" if front.startswith("from ") else front for front, names in joined.items()
    ]


@dataclass
class Names:
    """Finds what a name of a module's tree refers to."""

    scopes: Mapping[cst.CSTNode, Any]
    parents: Mapping[cst.CSTNode, Any]
    bindings: dict[tuple[int, str, str], Binding] = field(default_factory=dict)

    def import_binding(self, statement: ImportStatement, alias: cst.ImportAlias) -> Binding | None:
        """The binding an import makes, if TensorFlow's; equal imports in one scope share it."""
        local, full = imported(statement, alias)
        if not is_tensorflow(full):
            return None
        return self._binding(self.scopes.get(statement), local, full, by_import=True)

    def _binding(self, scope: Any, local: str, full: str, by_import: bool) -> Binding:
        return self.bindings.setdefault((id(scope), local, full), Binding(local, full, by_import))

    def resolve(self, node: cst.BaseExpression) -> Reference | None:
        """What of TensorFlow a dotted expression refers to, if anything."""
        text, first = dotted(node), first_name(node)
        scope = self.scopes.get(first) if first is not None else None
        if text is None or first is None or scope is None or not isinstance(node, (cst.Name, cst.Attribute)):
            return None
        meanings = list(dict.fromkeys(self._meanings(scope, first.value, text)))
        found = tuple(meaning for meaning in meanings if meaning is not None)
        if not found or (len(meanings) > 1 and not any(meaning.by_import for meaning in found)):
            return None  # a variable, to which several values are assigned
        tail = text[len(first.value) :]
        name = (found[0].full + tail).removeprefix(ROOT).removeprefix(".")
        return Reference(node, text, name, tail, found, is_sure=len(meanings) == 1)

    def _meanings(self, scope: Any, first: str, text: str) -> Iterator[Binding | None]:
        """What the first name may be; None stands for what is not TensorFlow's."""
        parts = text.split(".")
        # `import a.b` is kept by libcst as an assignment of "a.b".
        fronts = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        for assignment in {id(a): a for front in fronts for a in scope[front]}.values():
            if isinstance(assignment, metadata.ImportAssignment):
                yield self._imported(assignment, first)
            elif assignment.name == first and not self._is_none(assignment):
                yield self._assigned(assignment)

    def _imported(self, assignment: Any, first: str) -> Binding | None:
        statement = assignment.node
        for alias in aliases(statement):
            if imported(statement, alias)[0] == first:
                return self.import_binding(statement, alias)
        return None

    def _statement(self, assignment: Any) -> cst.Assign | None:
        """The statement `name = value` that an assignment is of."""
        node = getattr(assignment, "node", None)
        target = self.parents.get(node) if isinstance(node, cst.Name) else None
        statement = self.parents.get(target) if isinstance(target, cst.AssignTarget) else None
        return statement if isinstance(statement, cst.Assign) and len(statement.targets) == 1 else None

    def _is_none(self, assignment: Any) -> bool:
        """`tf = None`, after an import that failed."""
        statement = self._statement(assignment)
        return statement is not None and dotted(statement.value) == "None"

    def _assigned(self, assignment: Any) -> Binding | None:
        """The binding of `name = tf.module`; a constant or function is not one."""
        statement = self._statement(assignment)
        first = first_name(statement.value) if statement is not None else None
        if statement is None or first is None or first.value == assignment.name:
            return None
        reference = self.resolve(statement.value)
        if reference is None or not reference.is_sure or reference.name in rules.OPS.keys() | rules.VALUES.keys():
            return None
        return self._binding(assignment.scope, assignment.name, f"{ROOT}.{reference.name}", by_import=False)

    def is_free(self, name: str, node: cst.CSTNode) -> bool:
        """Whether `name`, written at a dotted expression, means the module or builtin of that name."""
        scope = self.scopes.get(first_name(node) or node)
        for assignment in scope[name] if scope is not None else ():
            if isinstance(assignment, metadata.BuiltinAssignment) or self._is_none(assignment):
                continue
            if isinstance(assignment, metadata.ImportAssignment):
                statement: Any = assignment.node
                full = dict(imported(statement, alias) for alias in aliases(statement)).get(name)
            else:
                binding = self._assigned(assignment)
                full = binding and binding.full
            if full not in (name, f"{ROOT}.{name}"):
                return False
        return True

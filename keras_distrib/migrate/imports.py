"""What becomes of a script's import statements, and which it gets.

An import of TensorFlow stays for as long as a name of it is used. The *roots*
keras, keras_distrib and torch are imported where the first of TensorFlow was,
and the backend is chosen before the first import of Keras.
"""

from __future__ import annotations

import libcst as cst

from keras_distrib.migrate import targets
from keras_distrib.migrate.names import (
    Binding,
    ImportStatement,
    aliases,
    grouped,
    imported,
    is_tensorflow,
    module_of,
    modules_of,
)
from keras_distrib.migrate.report import Report
from keras_distrib.migrate.tree import Edits, Script

ROOTS = ("keras", "keras_distrib", "torch")
# The beginnings of packages that import Keras.
_IMPORT_KERAS = ("keras", "tensorflow", "tf_")


class Imports:
    """Collects the import statements, and decides on them when the references are decided."""

    def __init__(self, script: Script, edits: Edits, report: Report) -> None:
        self._script, self._edits, self._report = script, edits, report
        self._imports: list[ImportStatement] = []
        self._backend_set_at: list[int] = []
        self.uses_package = False

    def note(self, statement: ImportStatement) -> None:
        self._imports.append(statement)
        modules = modules_of(statement)
        self._report.uses_tensorflow |= any(is_tensorflow(module) for module in modules)
        self.uses_package |= any(module.split(".")[0] == "keras_distrib" for module in modules)

    def decide(self) -> None:
        for statement in self._imports:
            if isinstance(statement.names, cst.ImportStar):
                self._decide_star(statement)
                continue
            new: list[str | cst.ImportAlias] = []
            for alias in aliases(statement):
                binding = self._script.names.import_binding(statement, alias)
                replaced = alias if binding is None else self._replace_alias(statement, alias, binding)
                if replaced is not None:
                    new.append(replaced)
            if new != list(aliases(statement)):
                self._edits.imports[id(statement)] = new
                after = "; ".join(grouped([one for one in new if isinstance(one, str)])) or "taken out"
                self._report.change(self._script.line(statement), self._script.code(statement), after)

    def _decide_star(self, statement: ImportStatement) -> None:
        if not isinstance(statement, cst.ImportFrom) or not is_tensorflow(module_of(statement)):
            return
        module = targets.module_name(module_of(statement).removeprefix("tensorflow").removeprefix("."))
        if module is None:
            self._report.miss(
                self._script.line(statement), self._script.code(statement), "import the names that are used"
            )
            return
        self._edits.imports[id(statement)] = [f"from {module} import *"]
        self._report.change(self._script.line(statement), self._script.code(statement), f"from {module} import *")

    def _replace_alias(
        self, statement: ImportStatement, alias: cst.ImportAlias, binding: Binding
    ) -> cst.ImportAlias | str | None:
        """What becomes of one imported name: it stays, is imported from elsewhere, or goes."""
        if binding.stays:
            return alias
        if not binding.name or not (binding.through or binding.moved):
            unused = targets.judge(binding.name, False) if binding.name else None
            if isinstance(unused, (targets.Missing, targets.Kept)):
                if isinstance(unused, targets.Missing):
                    self._report.miss(self._script.line(statement), self._script.code(statement), unused.reason)
                return alias
        module = targets.module_name(binding.name) if binding.name else None
        if module is None or (binding.moved and not binding.through):
            return None
        parent, _, last = module.rpartition(".")
        name = f"{last} as {binding.local}" if last != binding.local else last
        return f"from {parent} import {name}" if parent else f"import {name}"

    def insert(self) -> None:
        """Which imports, and the choice of the backend, go before which top-level statement."""
        if not self._edits:
            return
        statements = list(self._script.module.body)
        tops = [(statement, *self._script.top_level(statement)) for statement in self._imports]
        start = next((s for s in statements if not self._is_preamble(s)), None)
        first = [top for statement, top, outside in tops if outside and _has_root(statement, ("tensorflow",))]
        anchor = first[0] if first else start
        if anchor is None:
            return
        needed = {text.split(".")[0] for text in self._edits.texts.values() if not text.startswith(('"', "'"))}
        roots = [f"import {root}" for root in ROOTS if root in needed and not self._binds_at_top(root, tops)]
        uses_keras = bool(needed) or any("keras" in str(new) for news in self._edits.imports.values() for new in news)
        for line in roots:
            self._report.add(self._script.line(anchor), line)
        self._edits.before.setdefault(id(anchor), []).extend(roots)
        if uses_keras:
            keras = [top for statement, top, outside in tops if outside and _has_root(statement, _IMPORT_KERAS)]
            order = {id(statement): index for index, statement in enumerate(statements)}
            self._insert_backend(min([*keras, anchor], key=lambda statement: order[id(statement)]), tops)

    def _insert_backend(self, anchor: cst.CSTNode, tops: list[tuple[ImportStatement, cst.CSTNode, bool]]) -> None:
        line = self._script.line(anchor)
        if any(at <= line for at in self._backend_set_at):
            return
        has_os = any(
            outside
            and self._script.line(statement) < line
            and ("os", "os") in [imported(statement, a) for a in aliases(statement)]
            for statement, _, outside in tops
        )
        lines = [] if has_os else ["import os", ""]
        lines += ['os.environ["KERAS_BACKEND"] = "torch"']
        self._edits.before[id(anchor)] = lines + self._edits.before.get(id(anchor), [])
        self._report.add(line, lines[-1])

    @staticmethod
    def _is_preamble(statement: cst.CSTNode) -> bool:
        """A docstring or an import from `__future__`."""
        if not isinstance(statement, cst.SimpleStatementLine):
            return False
        first = statement.body[0]
        if isinstance(first, cst.Expr):
            return isinstance(first.value, (cst.SimpleString, cst.ConcatenatedString))
        return isinstance(first, cst.ImportFrom) and module_of(first) == "__future__"

    def _binds_at_top(self, root: str, tops: list[tuple[ImportStatement, cst.CSTNode, bool]]) -> bool:
        """Whether a top-level import binds the module's own name, after the edits."""
        for statement, top, _ in tops:
            if not isinstance(top, cst.SimpleStatementLine):
                continue
            edited = self._edits.imports.get(id(statement))
            if edited is not None and f"import {root}" in edited:
                return True
            left = (
                [alias for alias in edited or () if not isinstance(alias, str)]
                if edited is not None
                else aliases(statement)
            )
            if any(imported(statement, alias) == (root, root) for alias in left):
                return True
        return False

    def note_assignment(self, node: cst.Assign) -> None:
        """Notes `os.environ["KERAS_BACKEND"] = value`."""
        for target in node.targets:
            subscript = target.target
            if isinstance(subscript, cst.Subscript) and len(subscript.slice) == 1:
                index = subscript.slice[0].slice
                if isinstance(index, cst.Index) and self._is_backend_key(index.value):
                    self._set_backend(node, node.value)

    def note_call(self, call: cst.Call) -> None:
        """Notes `os.environ.setdefault("KERAS_BACKEND", value)`."""
        if len(call.args) == 2 and self._is_backend_key(call.args[0].value):
            self._set_backend(call, call.args[1].value)

    @staticmethod
    def _is_backend_key(node: cst.BaseExpression) -> bool:
        return isinstance(node, cst.SimpleString) and node.evaluated_value == "KERAS_BACKEND"

    def _set_backend(self, node: cst.CSTNode, value: cst.BaseExpression) -> None:
        self._backend_set_at.append(self._script.line(node))
        if isinstance(value, cst.SimpleString) and value.evaluated_value != "torch":
            self._edits.texts[id(value)] = '"torch"'
            self._report.change(self._script.line(node), f"KERAS_BACKEND {value.value}", '"torch"')


def _has_root(statement: ImportStatement, beginnings: tuple[str, ...]) -> bool:
    return any(module.startswith(beginnings) for module in modules_of(statement))

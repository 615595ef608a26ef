"""Makes the edits that the analysis decided."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import libcst as cst

from keras_distrib.migrate.calls import NewCall
from keras_distrib.migrate.names import grouped
from keras_distrib.migrate.tree import Edits


def _lines(texts: list[str]) -> list[cst.SimpleStatementLine]:
    """Statements of the texts; an empty text is an empty line before the next."""
    lines: list[cst.SimpleStatementLine] = []
    empty = False
    for text in texts:
        if text:
            leading = [cst.EmptyLine(indent=False)] if empty else []
            lines.append(
                cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine).with_changes(leading_lines=leading)
            )
        empty = not text
    return lines


class Rewriter(cst.CSTTransformer):
    """Applies `Edits` to the tree that they were made for."""

    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self._edits = edits
        self._carried: dict[int, list[cst.EmptyLine]] = {}

    def visit_Module(self, node: cst.Module) -> None:
        self._carry(node.body)

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self._carry(node.body)

    def _carry(self, body: Sequence[cst.BaseStatement]) -> None:
        """Hands the comments and empty lines before a statement that goes to the one after it."""
        for statement, following in itertools.pairwise(body):
            if isinstance(statement, cst.SimpleStatementLine) and self._goes(statement):
                lines = [*self._carried.get(id(statement), ()), *statement.leading_lines]
                self._carried[id(following)] = lines

    def _goes(self, statement: cst.SimpleStatementLine) -> bool:
        edits = self._edits
        if id(statement) in edits.before:
            return False
        return all(id(small) in edits.removed or edits.imports.get(id(small)) == [] for small in statement.body)

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        if id(original_node) in self._carried and not self._is_going(original_node):
            own = list(updated_node.leading_lines)
            carried = self._carried[id(original_node)]
            only_empty = all(line.comment is None for line in carried)
            lines = (
                max(carried, own, key=len) if only_empty and not any(line.comment for line in own) else carried + own
            )
            updated_node = updated_node.with_changes(leading_lines=lines)
        result = super().on_leave(original_node, updated_node)
        lines = self._edits.before.get(id(original_node))
        if not lines:
            return result
        return self._insert(_lines(lines), original_node, result)

    @staticmethod
    def _insert(new: list[cst.SimpleStatementLine], original: Any, result: Any) -> Any:
        """The new lines, then what is left of the statement; comments stay in front."""
        if isinstance(result, cst.FlattenSentinel):
            rest = list(result)
        else:
            rest = [] if isinstance(result, cst.RemovalSentinel) else [result]
        if rest and hasattr(rest[0], "leading_lines"):
            rest[0] = rest[0].with_changes(leading_lines=())
        new[0] = new[0].with_changes(leading_lines=original.leading_lines)
        if not rest and hasattr(original, "trailing_whitespace"):
            new[-1] = new[-1].with_changes(trailing_whitespace=original.trailing_whitespace)
        return cst.FlattenSentinel([*new, *rest])

    def _is_going(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.SimpleStatementLine) and self._goes(node)

    def _replaced(self, original: cst.CSTNode, updated: Any) -> Any:
        text = self._edits.texts.get(id(original))
        if text is None:
            return updated
        return cst.parse_expression(text).with_changes(lpar=updated.lpar, rpar=updated.rpar)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:
        return self._replaced(original_node, updated_node)

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> Any:
        return self._replaced(original_node, updated_node)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        if id(original_node) in self._edits.methods:
            return updated_node.with_changes(attr=cst.Name(self._edits.methods[id(original_node)]))
        return self._replaced(original_node, updated_node)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        new = self._edits.calls.get(id(original_node))
        return updated_node if new is None else updated_node.with_changes(args=_arguments(new, updated_node))

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> Any:
        return cst.RemoveFromParent() if id(original_node) in self._edits.removed else updated_node

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> Any:
        return cst.RemoveFromParent() if id(original_node) in self._edits.removed else updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """Replaces the import statements of a line, each of which may become several."""
        if not any(id(small) in self._edits.imports for small in original_node.body):
            return updated_node
        lines: list[cst.SimpleStatementLine] = []
        for small in original_node.body:
            news = self._edits.imports.get(id(small))
            if news is None:
                lines.append(cst.SimpleStatementLine([small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]))
                continue
            stay = [alias for alias in news if isinstance(alias, cst.ImportAlias)]
            lines += _lines(grouped([text for text in news if isinstance(text, str)]))
            if stay and isinstance(small, (cst.Import, cst.ImportFrom)):
                stay[-1] = stay[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
                left = small.with_changes(names=stay, semicolon=cst.MaybeSentinel.DEFAULT)
                lines.append(cst.SimpleStatementLine([left]))
        if not lines:
            return cst.RemoveFromParent()
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)


def _arguments(new: NewCall, call: cst.Call) -> list[cst.Arg]:
    """The arguments of the new call; the last one keeps the old last one's comma."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    arguments = []
    for index, keyword in new.arguments:
        old = call.args[index]
        if keyword is None or old.star:
            arguments.append(old)
        elif old.keyword is not None:
            arguments.append(old.with_changes(keyword=cst.Name(keyword)))
        else:
            arguments.append(old.with_changes(keyword=cst.Name(keyword), equal=equal))
    arguments += [cst.Arg(cst.parse_expression(code), keyword=cst.Name(name), equal=equal) for name, code in new.added]
    if not arguments:
        return []
    comma = call.args[-1].comma if call.args else cst.MaybeSentinel.DEFAULT
    arguments[-1] = arguments[-1].with_changes(comma=comma)
    return arguments

"""A script's tree, with what libcst knows of its nodes, and the edits to make in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import metadata

from keras_distrib.migrate.calls import NewCall
from keras_distrib.migrate.names import Names


@dataclass
class Edits:
    """What the rewriter does, by the identity of nodes.

    Attributes:
        texts: expressions and their new text.
        calls: calls and their new arguments.
        removed: statements that are taken out.
        imports: import statements and those that take their place.
        before: top-level statements and the lines that go before them.
        methods: attributes and their new name.
    """

    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, NewCall] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)
    imports: dict[int, list[str | cst.ImportAlias]] = field(default_factory=dict)
    before: dict[int, list[str]] = field(default_factory=dict)
    methods: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.texts, self.calls, self.removed, self.imports, self.before, self.methods))


class Script:
    """A script's tree.

    Attributes:
        module: its root.
        names: what its names refer to.
        parents: the node that each node is in.
        contexts: whether a name is read or written.
        scopes: the scope that each node is in.
    """

    def __init__(self, wrapper: metadata.MetadataWrapper) -> None:
        self.module = wrapper.module
        self.scopes: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.ScopeProvider)
        self.parents: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.ParentNodeProvider)
        self.contexts: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.ExpressionContextProvider)
        self._positions: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.PositionProvider)
        self.names = Names(self.scopes, self.parents)

    def line(self, node: cst.CSTNode) -> int:
        return self._positions[node].start.line

    def code(self, node: cst.CSTNode) -> str:
        """A node's text, on one line."""
        return " ".join(self.module.code_for_node(node).split())

    def top_level(self, node: cst.CSTNode) -> tuple[cst.CSTNode, bool]:
        """The top-level statement a node is in, and whether it is outside of functions and classes."""
        outside = True
        while not isinstance(self.parents[node], cst.Module):
            node = self.parents[node]
            outside = outside and not isinstance(node, (cst.FunctionDef, cst.ClassDef))
        return node, outside

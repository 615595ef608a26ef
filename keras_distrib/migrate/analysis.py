"""Reads a script and decides what to edit.

The *edits* are kept by the identity of the tree's nodes, which the rewriter
then visits; the report is filled on the way. A reference's final text is
decided at the end, when it is known what each import is still needed for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import metadata

from keras_distrib.migrate import calls, rules, targets
from keras_distrib.migrate.names import (
    Binding,
    ImportStatement,
    Names,
    Reference,
    aliases,
    dotted,
    grouped,
    imported,
    is_tensorflow,
    module_of,
)
from keras_distrib.migrate.pipelines import functions_in_pipelines, is_pipeline_call
from keras_distrib.migrate.report import Report

ROOTS = ("keras", "keras_distrib", "torch")
# What imports Keras, itself or through what it imports.
_IMPORT_KERAS = ("keras", "tensorflow", "tf_")
_LAYER_KEYWORDS = frozenset(
    ["input_shape", "input_dim", "batch_input_shape", "batch_shape", "batch_size", "dtype", "name", "trainable", "autocast", "weights"]
)
_NAMESPACES = ("nn", "math", "linalg", "random", "train", "dtypes")
_COMPARED = "a torch dtype never equals a string: compare `keras.backend.standardize_dtype(x.dtype)` with it"


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
    calls: dict[int, calls.NewCall] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)
    imports: dict[int, list[str | cst.ImportAlias]] = field(default_factory=dict)
    before: dict[int, list[str]] = field(default_factory=dict)
    methods: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.texts, self.calls, self.removed, self.imports, self.before, self.methods))


@dataclass
class _Pending:
    """A reference that gets a new text, once its import is decided."""

    reference: Reference
    text: str
    line: int
    note: str
    in_fstring: bool


class Analysis(cst.CSTVisitor):
    """Visits a module and fills `edits` and `report`."""

    METADATA_DEPENDENCIES = (
        metadata.ScopeProvider,
        metadata.ParentNodeProvider,
        metadata.PositionProvider,
        metadata.ExpressionContextProvider,
    )

    def __init__(self, wrapper: metadata.MetadataWrapper) -> None:
        super().__init__()
        scopes, parents, positions, contexts = (wrapper.resolve(one) for one in self.METADATA_DEPENDENCIES)
        self.edits, self.report = Edits(), Report()
        self._module = wrapper.module
        self._names = Names(scopes, parents)
        self._parents: Mapping[cst.CSTNode, Any] = parents
        self._positions: Mapping[cst.CSTNode, Any] = positions
        self._contexts: Mapping[cst.CSTNode, Any] = contexts
        self._scopes: Mapping[cst.CSTNode, Any] = scopes
        self._pipeline_functions = functions_in_pipelines(self._module, self._names)
        self._pipeline_arguments: set[int] = set()
        self._in_pipeline = 0
        self._in_fstring = 0
        self._pipeline_names: set[int] = set()
        self._kept_functions: set[cst.FunctionDef] = set()
        self._called: dict[int, cst.Call] = {}
        self._pending: list[_Pending] = []
        self._imports: list[ImportStatement] = []
        self._backend_set_at: list[int] = []
        self._namespace_aliases: list[tuple[cst.Assign, cst.CSTNode]] = []
        self._uses_package = False

    def run(self) -> None:
        self._module.visit(self)
        self._report_shared_functions()
        self._decide_references()
        self._decide_imports()
        self._decide_insertions()
        if not (self.report.uses_tensorflow or self._uses_package):
            self.report.missing.clear()
            self.report.changes.clear()
            self.edits = Edits()

    # Where the visitor is.

    def _line(self, node: cst.CSTNode) -> int:
        return self._positions[node].start.line

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._in_pipeline += node in self._pipeline_functions

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._in_pipeline -= original_node in self._pipeline_functions

    def visit_Arg(self, node: cst.Arg) -> None:
        self._in_pipeline += id(node) in self._pipeline_arguments

    def leave_Arg(self, original_node: cst.Arg) -> None:
        self._in_pipeline -= id(original_node) in self._pipeline_arguments

    def visit_FormattedString(self, node: cst.FormattedString) -> None:
        self._in_fstring += '"' in node.start

    def leave_FormattedString(self, original_node: cst.FormattedString) -> None:
        self._in_fstring -= '"' in original_node.start

    # Imports.

    def visit_Import(self, node: cst.Import) -> bool:
        return self._import(node)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return self._import(node)

    def _import(self, node: ImportStatement) -> bool:
        self._imports.append(node)
        star = isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar)
        modules = [module_of(node)] if star else [imported(node, alias)[1] for alias in aliases(node)]
        if any(is_tensorflow(module) for module in modules):
            self.report.uses_tensorflow = True
        self._uses_package |= any(module.split(".")[0] == "keras_distrib" for module in modules)
        return False

    # Calls.

    def visit_Call(self, node: cst.Call) -> None:
        self._called[id(node.func)] = node
        if is_pipeline_call(self._names, node):
            self._pipeline_arguments.update(id(argument) for argument in node.args)
        self._note_backend(node)
        if isinstance(node.func, cst.Attribute) and not self._in_pipeline and self._names.resolve(node.func) is None:
            self._method(node, node.func)

    def _method(self, call: cst.Call, function: cst.Attribute) -> None:
        """Checks a method by its name, on an object of unknown type."""
        method = function.attr.value
        receiver = dotted(function.value) or ""
        line = self._line(call)
        if method in rules.METHOD_RENAMES:
            self.edits.methods[id(function)] = rules.METHOD_RENAMES[method]
            self.report.change(line, f".{method}", f".{rules.METHOD_RENAMES[method]}")
        elif method in rules.METHOD_REASONS and receiver.split(".")[0] not in ("np", "numpy", "scipy"):
            self.report.miss(line, f".{method}", rules.METHOD_REASONS[method])
        elif receiver.lower().endswith("strategy"):
            reason = targets.why_no_method(method)
            if reason is not None:
                self.report.miss(line, f"Strategy.{method}", reason)
        for argument in call.args:
            reason = rules.METHOD_KEYWORDS.get(method, {}).get(argument.keyword.value if argument.keyword else "")
            if reason is not None and argument.keyword is not None:
                self.report.miss(line, f".{method}({argument.keyword.value}=)", reason)

    # Names.

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        self._learning_rate(node)
        if dotted(node) is None:
            return True
        self._name(node)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self._name(node)

    def _learning_rate(self, node: cst.Attribute) -> None:
        """Keras 2's `optimizer.lr`."""
        receiver = (dotted(node.value) or "").lower()
        if node.attr.value == "lr" and receiver.endswith(("optimizer", "opt")) and not self._in_pipeline:
            self.edits.methods[id(node)] = "learning_rate"
            self.report.change(self._line(node), ".lr", ".learning_rate")

    def _name(self, node: cst.Name | cst.Attribute) -> None:
        context = self._contexts.get(node)
        if context is None or (isinstance(node, cst.Name) and context is not metadata.ExpressionContext.LOAD):
            return
        if self._in_pipeline:
            self._pipeline_names.add(id(node))
        reference = self._names.resolve(node)
        if reference is None:
            return
        if not reference.is_sure:
            self._leave(reference, f"`{reference.bindings[0].local}` is another thing as well here: rename one")
        elif context is not metadata.ExpressionContext.LOAD:
            self._leave(reference, "a name of TensorFlow is assigned to")
        elif reference.tail or reference.bindings[0].by_import:
            self._reference(reference)

    def _leave(self, reference: Reference, reason: str) -> None:
        for binding in reference.bindings:
            binding.stays += 1
        self.report.miss(self._line(reference.node), reference.text, reason)

    def _reference(self, reference: Reference) -> None:
        verdict = targets.judge(reference.name, self._in_pipeline > 0)
        call = self._called.get(id(reference.node))
        if isinstance(verdict, targets.Kept):
            reference.bindings[0].stays += 1
            self.report.keep(self._line(reference.node), reference.text)
            self._note_kept_function(reference.node)
        elif isinstance(verdict, targets.Removed):
            self._remove(reference, verdict, call)
        elif isinstance(verdict, targets.Missing):
            self._missing(reference, verdict.reason)
        elif verdict.is_literal and self._is_compared(reference.node):
            self._leave(reference, _COMPARED)
        elif verdict.op is not None:
            self._operation(reference, verdict.op, call)
        else:
            if call is not None:
                self._check_keywords(reference, verdict.text, call)
            self._take(reference, verdict.text)

    def _missing(self, reference: Reference, reason: str) -> None:
        """Leaves a name; one of tf.keras counts as Keras', whose import gets its new meaning."""
        binding = reference.bindings[0]
        if not reference.tail and not binding.by_import:
            return
        if reference.name in _NAMESPACES and self._is_namespace_alias(reference.node):
            return
        if binding.by_import and targets.longest_prefix(binding.name, ("keras",)) and targets.module_name(binding.name):
            binding.through += 1
        else:
            binding.stays += 1
        self.report.miss(self._line(reference.node), reference.text, reason)

    def _is_namespace_alias(self, node: cst.CSTNode) -> bool:
        """Takes out `nn = tf.nn`, if all that is used of it is written in full; else it stays."""
        statement = self._parents.get(node)
        if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
            return False
        self._namespace_aliases.append((statement, node))
        return True

    def _remove(self, reference: Reference, verdict: targets.Removed, call: cst.Call | None) -> None:
        statement = self._parents.get(call) if call is not None else None
        if not isinstance(statement, cst.Expr):
            self._leave(reference, verdict.why)
            return
        self.edits.removed.add(id(statement))
        reference.bindings[0].moved += 1
        self.report.change(self._line(reference.node), reference.text, "taken out", verdict.why)

    def _operation(self, reference: Reference, op: rules.Op, call: cst.Call | None) -> None:
        try:
            if call is None:
                calls.check_value(reference.name, op)
                new = calls.NewCall(op.target)
            else:
                new = calls.translate(reference.name, op, self._given(call, op))
        except calls.CannotTranslateError as error:
            self._leave(reference, str(error))
            return
        function = new.function
        if self._take(reference, function, ", ".join(new.notes)) and call is not None:
            self.edits.calls[id(call)] = new

    def _given(self, call: cst.Call, op: rules.Op) -> calls.Given:
        parent = self._parents.get(call)
        is_iterated = isinstance(parent, (cst.For, cst.CompFor)) and parent.iter is call
        is_operand = isinstance(parent, (cst.BinaryOperation, cst.UnaryOperation, cst.AugAssign))
        return calls.Given(call, op.target, {}, is_iterated, is_operand, self._dtype_of)

    def _dtype_of(self, node: cst.BaseExpression) -> str | None:
        if isinstance(node, cst.SimpleString):
            return str(node.evaluated_value)
        reference = self._names.resolve(node)
        return rules.DTYPES.get(reference.name) if reference is not None else None

    def _is_compared(self, node: cst.CSTNode) -> bool:
        return isinstance(self._parents.get(node), (cst.Comparison, cst.ComparisonTarget))

    def _take(self, reference: Reference, text: str, note: str = "") -> bool:
        """Gives a reference a new text, if the name that starts it is free here."""
        root = text.split(".")[0]
        if root.isidentifier() and not self._names.is_free(root, reference.node):
            self._leave(reference, f"`{root}` is another thing here: rename it")
            return False
        line = self._line(reference.node)
        self._pending.append(_Pending(reference, text, line, note, self._in_fstring > 0))
        return True

    def _check_keywords(self, reference: Reference, new: str, call: cst.Call) -> None:
        """Reports keyword arguments that the new class or function does not take."""
        parameters = targets.parameters(new)
        if parameters is None:
            return
        known = {parameter.name for parameter in parameters}
        is_optimizer = new.startswith("keras.optimizers.") and ".schedules." not in new
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            if new.startswith("keras.layers."):
                known |= _LAYER_KEYWORDS
            elif not is_optimizer:
                return
        line = self._line(call)
        for index, argument in enumerate(call.args):
            keyword = argument.keyword.value if argument.keyword is not None else None
            if keyword is None or keyword in known:
                continue
            if is_optimizer and keyword in rules.OPTIMIZER_RENAMES:
                renamed = rules.OPTIMIZER_RENAMES[keyword]
                edit = self.edits.calls.setdefault(id(call), self._same_call(new, call))
                edit.arguments[index] = (index, renamed)
                self.report.change(line, f"{reference.text}({keyword}=)", f"{new}({renamed}=)")
            else:
                reason = rules.OPTIMIZER_REASONS.get(keyword) if is_optimizer else None
                self.report.miss(line, f"{reference.text}({keyword}=)", reason or f"{new} has no argument `{keyword}`")

    @staticmethod
    def _same_call(new: str, call: cst.Call) -> calls.NewCall:
        pairs = [(index, argument.keyword and argument.keyword.value) for index, argument in enumerate(call.args)]
        return calls.NewCall(new, pairs)

    # The end.

    def _note_kept_function(self, node: cst.CSTNode) -> None:
        while not isinstance(node, cst.Module):
            if isinstance(node, cst.FunctionDef) and node in self._pipeline_functions:
                self._kept_functions.add(node)
            node = self._parents[node]

    def _report_shared_functions(self) -> None:
        """Reports functions of a pipeline that stay TensorFlow's and are used elsewhere too."""
        for function in self._kept_functions:
            scope = self._scopes.get(function)
            for assignment in scope[function.name.value] if scope is not None else ():
                elsewhere = [access for access in assignment.references if id(access.node) not in self._pipeline_names]
                if assignment.node is function and elsewhere:
                    reason = "it is used in a tf.data pipeline, where it stays TensorFlow's, and elsewhere: write two"
                    self.report.miss(self._line(function.name), function.name.value, reason)

    def _decide_references(self) -> None:
        for pending in self._pending:
            binding = pending.reference.bindings[0]
            module = targets.module_name(binding.name) if binding.name else None
            same = module is not None and module + pending.reference.tail == pending.text
            if same and not (binding.by_import and binding.stays):
                binding.through += 1
            else:
                binding.moved += 1
                self._set_text(pending)
        for statement, node in self._namespace_aliases:
            self._decide_namespace_alias(statement, node)

    def _set_text(self, pending: _Pending) -> None:
        text = pending.text.replace('"', "'") if pending.in_fstring else pending.text
        self.edits.texts[id(pending.reference.node)] = text
        self.report.change(pending.line, pending.reference.text, pending.text, pending.note)

    def _decide_namespace_alias(self, statement: cst.Assign, node: cst.CSTNode) -> None:
        reference = self._names.resolve(node) if isinstance(node, (cst.Name, cst.Attribute)) else None
        local = dotted(statement.targets[0].target)
        if reference is None:
            return
        full = f"tensorflow.{reference.name}"
        own = [b for b in self._names.bindings.values() if not b.by_import and (b.local, b.full) == (local, full)]
        if any(binding.stays for binding in own) or not own:
            reference.bindings[0].stays += 1
            self.report.miss(self._line(node), reference.text, "it stays for the names above")
        else:
            reference.bindings[0].moved += 1
            self.edits.removed.add(id(statement))
            self.report.change(self._line(node), f"{local} = {reference.text}", "taken out")

    def _decide_imports(self) -> None:
        for statement in self._imports:
            if isinstance(statement.names, cst.ImportStar):
                self._decide_star(statement)
                continue
            new: list[str | cst.ImportAlias] = []
            for alias in aliases(statement):
                binding = self._names.import_binding(statement, alias)
                replaced = alias if binding is None else self._replace_alias(statement, alias, binding)
                if replaced is not None:
                    new.append(replaced)
            if new != list(aliases(statement)):
                self.edits.imports[id(statement)] = new
                after = "; ".join(grouped([one for one in new if isinstance(one, str)])) or "taken out"
                self.report.change(self._line(statement), self._code(statement), after)

    def _code(self, node: cst.CSTNode) -> str:
        return " ".join(self._module.code_for_node(node).split())

    def _decide_star(self, statement: ImportStatement) -> None:
        if not isinstance(statement, cst.ImportFrom) or not is_tensorflow(module_of(statement)):
            return
        module = targets.module_name(module_of(statement).removeprefix("tensorflow").removeprefix("."))
        if module is None:
            self.report.miss(self._line(statement), self._code(statement), "import the names that are used")
            return
        self.edits.imports[id(statement)] = [f"from {module} import *"]
        self.report.change(self._line(statement), self._code(statement), f"from {module} import *")

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
                    self.report.miss(self._line(statement), self._code(statement), unused.reason)
                return alias
        module = targets.module_name(binding.name) if binding.name else None
        if module is None or (binding.moved and not binding.through):
            return None
        parent, _, last = module.rpartition(".")
        name = f"{last} as {binding.local}" if last != binding.local else last
        return f"from {parent} import {name}" if parent else f"import {name}"

    def _top_level(self, node: cst.CSTNode) -> tuple[cst.CSTNode, bool]:
        """The top-level statement a node is in, and whether it is outside of functions and classes."""
        outside = True
        while not isinstance(self._parents[node], cst.Module):
            node = self._parents[node]
            outside = outside and not isinstance(node, (cst.FunctionDef, cst.ClassDef))
        return node, outside

    def _decide_insertions(self) -> None:
        """Which imports, and the choice of the backend, go before which top-level statement."""
        if not self.edits:
            return
        statements = list(self._module.body)
        tops = [(statement, *self._top_level(statement)) for statement in self._imports]
        start = next((s for s in statements if not self._is_preamble(s)), None)
        first = [top for statement, top, outside in tops if outside and self._has_root(statement, ("tensorflow",))]
        anchor = first[0] if first else start
        if anchor is None:
            return
        needed = {text.split(".")[0] for text in self.edits.texts.values() if "." in text}
        roots = [f"import {root}" for root in ROOTS if root in needed and not self._binds_at_top(root, tops)]
        changes_keras = bool(roots) or any("keras" in str(new) for news in self.edits.imports.values() for new in news)
        for line in roots:
            self.report.add(self._line(anchor), line)
        self.edits.before.setdefault(id(anchor), []).extend(roots)
        if changes_keras:
            keras = [top for statement, top, outside in tops if outside and self._has_root(statement, _IMPORT_KERAS)]
            order = {id(statement): index for index, statement in enumerate(statements)}
            self._insert_backend(min([*keras, anchor], key=lambda statement: order[id(statement)]), tops)

    def _insert_backend(self, anchor: cst.CSTNode, tops: list[tuple[ImportStatement, cst.CSTNode, bool]]) -> None:
        line = self._line(anchor)
        if any(at <= line for at in self._backend_set_at):
            return
        has_os = any(
            outside
            and self._line(statement) < line
            and ("os", "os") in [imported(statement, a) for a in aliases(statement)]
            for statement, _, outside in tops
        )
        lines = [] if has_os else ["import os", ""]
        lines += ['os.environ["KERAS_BACKEND"] = "torch"']
        self.edits.before[id(anchor)] = lines + self.edits.before.get(id(anchor), [])
        self.report.add(line, lines[-1])

    @staticmethod
    def _is_preamble(statement: cst.CSTNode) -> bool:
        """A docstring or an import from `__future__`."""
        if not isinstance(statement, cst.SimpleStatementLine):
            return False
        first = statement.body[0]
        if isinstance(first, cst.Expr):
            return isinstance(first.value, (cst.SimpleString, cst.ConcatenatedString))
        return isinstance(first, cst.ImportFrom) and module_of(first) == "__future__"

    @staticmethod
    def _has_root(statement: ImportStatement, roots: tuple[str, ...]) -> bool:
        star = isinstance(statement, cst.ImportFrom) and isinstance(statement.names, cst.ImportStar)
        modules = [module_of(statement)] if star else [imported(statement, a)[1] for a in aliases(statement)]
        return any(module.startswith(roots) for module in modules)

    def _binds_at_top(self, root: str, tops: list[tuple[ImportStatement, cst.CSTNode, bool]]) -> bool:
        """Whether a top-level import binds the module's own name, after the edits."""
        for statement, top, _ in tops:
            if not isinstance(top, cst.SimpleStatementLine):
                continue
            edited = self.edits.imports.get(id(statement))
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

    # The choice of the backend.

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            subscript = target.target
            if isinstance(subscript, cst.Subscript) and len(subscript.slice) == 1:
                index = subscript.slice[0].slice
                if isinstance(index, cst.Index) and self._is_backend_key(index.value):
                    self._set_backend(node, node.value)

    def _note_backend(self, call: cst.Call) -> None:
        if len(call.args) == 2 and self._is_backend_key(call.args[0].value):
            self._set_backend(call, call.args[1].value)

    @staticmethod
    def _is_backend_key(node: cst.BaseExpression) -> bool:
        return isinstance(node, cst.SimpleString) and node.evaluated_value == "KERAS_BACKEND"

    def _set_backend(self, node: cst.CSTNode, value: cst.BaseExpression) -> None:
        self._backend_set_at.append(self._line(node))
        if isinstance(value, cst.SimpleString) and value.evaluated_value != "torch":
            self.edits.texts[id(value)] = '"torch"'
            self.report.change(self._line(node), f"KERAS_BACKEND {value.value}", '"torch"')

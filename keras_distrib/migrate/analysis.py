"""Reads a script and decides what to edit.

The *edits* are kept by the identity of the tree's nodes, which the rewriter
then visits; the report is filled on the way. A reference's final text is
decided at the end, when it is known what each import is still needed for.
"""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
from libcst import metadata

from keras_distrib.migrate import calls, rules, targets
from keras_distrib.migrate.imports import Imports
from keras_distrib.migrate.methods import Methods
from keras_distrib.migrate.names import Reference, dotted
from keras_distrib.migrate.pipelines import functions_in_pipelines, is_pipeline_call
from keras_distrib.migrate.report import Report
from keras_distrib.migrate.tree import Edits, Script

_NAMESPACES = ("nn", "math", "linalg", "random", "train", "dtypes")
_COMPARED = "a torch dtype never equals a string: compare `keras.backend.standardize_dtype(x.dtype)` with it"


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

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.edits, self.report = Edits(), Report()
        self._script, self._names, self._parents = script, script.names, script.parents
        self._imports = Imports(script, self.edits, self.report)
        self._methods = Methods(script, self.edits, self.report)
        self._pipeline_functions = functions_in_pipelines(script.module, script.names)
        self._pipeline_arguments: set[int] = set()
        self._in_pipeline = 0
        self._in_fstring = 0
        self._pipeline_names: set[int] = set()
        self._kept_functions: set[cst.FunctionDef] = set()
        self._called: dict[int, cst.Call] = {}
        self._pending: list[_Pending] = []
        self._namespace_aliases: list[tuple[cst.Assign, cst.CSTNode]] = []

    def run(self) -> None:
        """Fills the edits and the report, which stay empty for a script without TensorFlow."""
        self._script.module.visit(self)
        if not (self.report.uses_tensorflow or self._imports.uses_package):
            self.edits, self.report = Edits(), Report()
            return
        self._report_shared_functions()
        self._decide_references()
        self._imports.decide()
        self._imports.insert()

    # Where the visitor is.

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

    # Statements.

    def visit_Import(self, node: cst.Import) -> bool:
        self._imports.note(node)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        self._imports.note(node)
        return False

    def visit_Assign(self, node: cst.Assign) -> None:
        self._imports.note_assignment(node)

    # Calls.

    def visit_Call(self, node: cst.Call) -> None:
        self._called[id(node.func)] = node
        if is_pipeline_call(self._names, node):
            self._pipeline_arguments.update(id(argument) for argument in node.args)
        self._imports.note_call(node)
        if isinstance(node.func, cst.Attribute) and not self._in_pipeline and self._names.resolve(node.func) is None:
            self._methods.method(node, node.func)

    # Names.

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if not self._in_pipeline:
            self._methods.learning_rate(node)
        if dotted(node) is None:
            return True
        self._name(node)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self._name(node)

    def _name(self, node: cst.Name | cst.Attribute) -> None:
        context = self._script.contexts.get(node)
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
        self.report.miss(self._script.line(reference.node), reference.text, reason)

    def _reference(self, reference: Reference) -> None:
        verdict = targets.judge(reference.name, self._in_pipeline > 0)
        call = self._called.get(id(reference.node))
        if isinstance(verdict, targets.Kept):
            reference.bindings[0].stays += 1
            self.report.keep(self._script.line(reference.node), reference.text)
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
                self._methods.keywords(reference, verdict.text, call)
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
        self.report.miss(self._script.line(reference.node), reference.text, reason)

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
        self.report.change(self._script.line(reference.node), reference.text, "taken out", verdict.why)

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
        line = self._script.line(reference.node)
        self._pending.append(_Pending(reference, text, line, note, self._in_fstring > 0))
        return True

    # The end.

    def _note_kept_function(self, node: cst.CSTNode) -> None:
        while not isinstance(node, cst.Module):
            if isinstance(node, cst.FunctionDef) and node in self._pipeline_functions:
                self._kept_functions.add(node)
            node = self._parents[node]

    def _report_shared_functions(self) -> None:
        """Reports functions of a pipeline that stay TensorFlow's and are used elsewhere too."""
        for function in self._kept_functions:
            scope = self._script.scopes.get(function)
            for assignment in scope[function.name.value] if scope is not None else ():
                elsewhere = [access for access in assignment.references if id(access.node) not in self._pipeline_names]
                if assignment.node is function and elsewhere:
                    reason = "it is used in a tf.data pipeline, where it stays TensorFlow's, and elsewhere: write two"
                    self.report.miss(self._script.line(function.name), function.name.value, reason)

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
        statement = self._parents[pending.reference.node]
        if isinstance(statement, cst.Assign) and [dotted(one.target) for one in statement.targets] == [pending.text]:
            # `keras = tf.keras`: the import says it.
            self.edits.removed.add(id(statement))
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
            self.report.miss(self._script.line(node), reference.text, "it stays for the names above")
        else:
            reference.bindings[0].moved += 1
            self.edits.removed.add(id(statement))
            self.report.change(self._script.line(node), f"{local} = {reference.text}", "taken out")

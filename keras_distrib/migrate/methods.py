"""Checks of methods by their name and of keyword arguments by Keras' signatures."""

from __future__ import annotations

import libcst as cst

from keras_distrib.migrate import rules, targets
from keras_distrib.migrate.calls import NewCall
from keras_distrib.migrate.names import Reference, dotted
from keras_distrib.migrate.report import Report
from keras_distrib.migrate.tree import Edits, Script

# What the base class of layers takes through `**kwargs`.
_LAYER_KEYWORDS = frozenset(
    [
        "autocast",
        "batch_input_shape",
        "batch_shape",
        "batch_size",
        "dtype",
        "input_dim",
        "input_shape",
        "name",
        "trainable",
        "weights",
    ]
)


class Methods:
    """Reports and renames what is found by name, since the types of objects are not known."""

    def __init__(self, script: Script, edits: Edits, report: Report) -> None:
        self._script, self._edits, self._report = script, edits, report

    def method(self, call: cst.Call, function: cst.Attribute) -> None:
        """Checks a method by its name, on an object of unknown type."""
        method = function.attr.value
        receiver = dotted(function.value) or ""
        line = self._script.line(call)
        if method in rules.METHOD_RENAMES:
            self._edits.methods[id(function)] = rules.METHOD_RENAMES[method]
            self._report.change(line, f".{method}", f".{rules.METHOD_RENAMES[method]}")
        elif method in rules.METHOD_REASONS and receiver.split(".")[0] not in ("np", "numpy", "scipy"):
            self._report.miss(line, f".{method}", rules.METHOD_REASONS[method])
        elif receiver.lower().endswith("strategy"):
            reason = targets.why_no_method(method)
            if reason is not None:
                self._report.miss(line, f"Strategy.{method}", reason)
        for argument in call.args:
            reason = rules.METHOD_KEYWORDS.get(method, {}).get(argument.keyword.value if argument.keyword else "")
            if reason is not None and argument.keyword is not None:
                self._report.miss(line, f".{method}({argument.keyword.value}=)", reason)

    def learning_rate(self, node: cst.BaseExpression) -> None:
        """Keras 2's `optimizer.lr`, also within a longer name."""
        while isinstance(node, cst.Attribute):
            receiver = (dotted(node.value) or "").lower()
            if node.attr.value == "lr" and receiver.endswith(("optimizer", "opt")):
                self._edits.methods[id(node)] = "learning_rate"
                self._report.change(self._script.line(node), ".lr", ".learning_rate")
            node = node.value

    def keywords(self, reference: Reference, new: str, call: cst.Call) -> None:
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
        line = self._script.line(call)
        for index, argument in enumerate(call.args):
            keyword = argument.keyword.value if argument.keyword is not None else None
            if keyword is None or keyword in known:
                continue
            if is_optimizer and keyword in rules.OPTIMIZER_RENAMES:
                renamed = rules.OPTIMIZER_RENAMES[keyword]
                edit = self._edits.calls.setdefault(id(call), self._same_call(new, call))
                edit.arguments[index] = (index, renamed)
                self._report.change(line, f"{reference.text}({keyword}=)", f"{new}({renamed}=)")
            else:
                reason = rules.OPTIMIZER_REASONS.get(keyword) if is_optimizer else None
                self._report.miss(line, f"{reference.text}({keyword}=)", reason or f"{new} has no argument `{keyword}`")

    @staticmethod
    def _same_call(new: str, call: cst.Call) -> NewCall:
        pairs = [(index, argument.keyword and argument.keyword.value) for index, argument in enumerate(call.args)]
        return NewCall(new, pairs)

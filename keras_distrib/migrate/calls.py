"""Translates the arguments of a call.

A *new call* is a new function and the old arguments in the order they keep,
some under a new keyword, and what is added. A call whose arguments do not
certainly mean the same raises `CannotTranslateError` with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from keras_distrib.migrate import rules, targets


class CannotTranslateError(Exception):
    """The arguments have no counterpart."""


@dataclass
class NewCall:
    """What takes a call's place.

    Attributes:
        function: the new function's name.
        arguments: index of the old argument and its keyword, None for a positional one.
        added: keyword arguments that are added, as code.
        notes: what the report says of it.
    """

    function: str
    arguments: list[tuple[int, str | None]] = field(default_factory=list)
    added: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Given:
    """An old call's arguments by TensorFlow's parameter, and what is around it."""

    call: cst.Call
    target: str
    by_name: dict[str, cst.BaseExpression]
    is_iterated: bool = False
    is_operand: bool = False
    dtype_of: Callable[[cst.BaseExpression], str | None] = lambda _: None


def bind(op: rules.Op, call: cst.Call) -> list[tuple[rules.Parameter | None, cst.Arg]]:
    """Each argument with its parameter; None for those that go on as they are."""
    named = {parameter.name: parameter for parameter in op.parameters}
    pairs: list[tuple[rules.Parameter | None, cst.Arg]] = []
    for index, argument in enumerate(call.args):
        if op.rest is not None and index >= op.rest and argument.keyword is None and argument.star != "**":
            pairs.append((None, argument))
            continue
        if argument.star:
            raise CannotTranslateError(f"which arguments `{argument.star}` passes is not known: write them out")
        if argument.keyword is None:
            if index >= len(op.parameters):
                raise CannotTranslateError("it has more arguments than the function takes")
            pairs.append((op.parameters[index], argument))
        elif argument.keyword.value not in named:
            raise CannotTranslateError(f"the argument `{argument.keyword.value}` is not known")
        else:
            pairs.append((named[argument.keyword.value], argument))
    return pairs


def translate(name: str, op: rules.Op, given: Given) -> NewCall:
    """The call that takes the place of one of TensorFlow's.

    Raises:
        CannotTranslateError: if an argument has no counterpart.
    """
    pairs = bind(op, given.call)
    given.by_name = {parameter.name: argument.value for parameter, argument in pairs if parameter is not None}
    if name in SPECIAL:
        special = SPECIAL[name](given)
        if isinstance(special, NewCall):
            return special
        if special is not None:
            op, pairs = special, bind(special, given.call)
    for parameter in op.parameters:
        if parameter.needed and parameter.name not in given.by_name:
            raise CannotTranslateError(f"without `{parameter.name}` it means something else than {op.target}")
    new = NewCall(op.target)
    order = _positions(op.target)
    positional = True
    for index, (parameter, argument) in enumerate(pairs):
        if parameter is None:
            new.arguments.append((index, None))
            continue
        if parameter.left_out:
            new.notes.append(f"`{parameter.name}=` left out")
            positional = False
            continue
        if parameter.new is None:
            if _is_none(argument.value):
                positional = False
                continue
            raise CannotTranslateError(f"{op.target} has no counterpart of the argument `{parameter.name}`")
        position = order.index(parameter.new) if parameter.new in order else None
        positional = positional and argument.keyword is None and position == index
        new.arguments.append((index, None if positional else parameter.new))
    present = {keyword for _, keyword in new.arguments} | {p.new for p, _ in pairs if p is not None}
    new.added += [(keyword, code) for keyword, code in op.adds if keyword not in present]
    return new


def check_value(name: str, op: rules.Op) -> None:
    """Refuses a function that is passed on, not called, if its defaults differ."""
    if op.adds or name in ("range", "random.uniform", "split", "shape", "where", "Variable"):
        raise CannotTranslateError(f"passed as a value its arguments are not known: write a lambda with {op.target}")


def _positions(target: str) -> list[str]:
    """The names that the target takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in targets.parameters(target) or () if p.kind in kinds]


def _is_none(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"


def _is_integer(node: cst.BaseExpression | None) -> bool:
    if isinstance(node, cst.UnaryOperation):
        node = node.expression
    return isinstance(node, cst.Integer) or (isinstance(node, cst.Name) and node.value in ("True", "False"))


def _has_strings(node: cst.BaseExpression | None) -> bool:
    if isinstance(node, (cst.List, cst.Tuple)):
        return any(_has_strings(element.value) for element in node.elements)
    return isinstance(node, (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString))


def _is_integral_dtype(given: Given) -> bool:
    dtype = given.by_name.get("dtype")
    name = given.dtype_of(dtype) if dtype is not None else None
    return name is not None and name.strip('"').startswith(("int", "uint", "bool"))


def _arg_extreme(given: Given) -> rules.Op | None:
    """Indices are int32 here; an `output_type` that is an integer type goes."""
    output = given.by_name.get("output_type")
    if output is None or given.dtype_of(output) not in ('"int32"', '"int64"', "int32", "int64"):
        return None
    op = rules.OPS["argmax"]
    left_out = rules.Parameter("output_type", None, left_out=True)
    parameters = tuple(left_out if p.name == "output_type" else p for p in op.parameters)
    return rules.Op(given.target, parameters, adds=op.adds)


def _constant(given: Given) -> None:
    if _has_strings(given.by_name.get("value")):
        raise CannotTranslateError(rules.REASONS["string"])


def _shape(given: Given) -> None:
    if given.is_operand:
        raise CannotTranslateError("`keras.ops.shape` gives a tuple, with which there is no arithmetic")


def _split(given: Given) -> None:
    if not isinstance(given.by_name.get("num_or_size_splits"), cst.Integer):
        raise CannotTranslateError("`keras.ops.split` takes the indices to split at, not the sizes")


def _range(given: Given) -> NewCall | None:
    if given.is_iterated and all(argument.keyword is None for argument in given.call.args):
        return NewCall("range", [(index, None) for index in range(len(given.call.args))])
    return None


def _uniform(given: Given) -> rules.Op | None:
    if not _is_integral_dtype(given):
        return None
    if "maxval" not in given.by_name:
        raise CannotTranslateError("integers need `maxval`")
    op = rules.OPS["random.uniform"]
    return rules.Op("keras.random.randint", op.parameters, adds=(("minval", "0"),))


def _variable(given: Given) -> rules.Op | None:
    """Keras' variables of integers must be said not to be trainable, with torch."""
    op = rules.OPS["Variable"]
    if _has_strings(given.by_name.get("initial_value")):
        raise CannotTranslateError(rules.REASONS["string"])
    if "initial_value" not in given.by_name:
        raise CannotTranslateError("`keras.Variable` needs an initial value")
    integral = _is_integral_dtype(given) or (
        "dtype" not in given.by_name and _is_integer(given.by_name["initial_value"])
    )
    return rules.Op(op.target, op.parameters, adds=(("trainable", "False"),)) if integral else None


SPECIAL: dict[str, Callable[[Given], NewCall | rules.Op | None]] = {
    **dict.fromkeys(("argmax", "argmin", "math.argmax", "math.argmin"), _arg_extreme),
    "constant": _constant,
    "convert_to_tensor": _constant,
    "random.uniform": _uniform,
    "range": _range,
    "shape": _shape,
    "split": _split,
    "Variable": _variable,
}

"""`function`: marks a step or a loop as one computation, with a checked signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, overload

from keras_distrib.specs import conform, is_spec
from keras_distrib.values import leaves


class Function:
    """A Python function with a signature that its arguments are checked against.

    Make one with `keras_distrib.function`. Methods bind as those of plain
    functions do.

    Attributes:
        python_function: the function as it was written.
        input_signature: a tuple of specs, one for each argument that is passed;
            None if calls are not checked.
    """

    def __init__(self, python_function: Callable[..., Any], input_signature: Sequence[Any] | None = None) -> None:
        self.python_function = python_function
        self.input_signature = None if input_signature is None else tuple(input_signature)
        functools.update_wrapper(self, python_function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.input_signature is not None:
            args, kwargs = self._checked(args, kwargs)
        return self.python_function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Function:
        bare = isinstance(self.python_function, classmethod | staticmethod)
        if (instance is None and not bare) or not hasattr(self.python_function, "__get__"):
            return self
        return Function(self.python_function.__get__(instance, owner), self.input_signature)

    def __repr__(self) -> str:
        return f"<keras_distrib.function {getattr(self.python_function, '__qualname__', self.python_function)}>"

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        specs = self.input_signature or ()
        try:
            bound = inspect.signature(self.python_function).bind(*args, **kwargs)
            given = _flat_arguments(bound)
            if len(given) != len(specs):
                raise TypeError(f"it takes {len(specs)} arguments, as its input_signature says, and got {len(given)}")
            pairs = zip(specs, given.items(), strict=True)
            checked = [conform(spec, value, f"argument {name!r}") for spec, (name, value) in pairs]
        except TypeError as error:
            raise TypeError(
                f"Binding inputs to tf.function failed due to `{error}`. "
                f"Received args: {args} and kwargs: {kwargs} for signature: {specs} of {self!r}."
            ) from error
        names = list(given)
        positional = checked[: len(args)]
        return tuple(positional), dict(zip(names[len(args) :], checked[len(args) :], strict=True))


def _flat_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """What was passed, by name, in the order of the parameters; `*args` one by one."""
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            flat.update({f"{name}[{index}]": part for index, part in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            flat.update(value)
        else:
            flat[name] = value
    return flat


@overload
def function(func: Callable[..., Any]) -> Function: ...


@overload
def function(
    func: None = None,
    input_signature: Sequence[Any] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
) -> Callable[[Callable[..., Any]], Function]: ...


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Sequence[Any] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
) -> Any:
    """Marks a function of a custom loop as one computation.

    For steps, for whole loops with steps in them, and for methods; marked functions
    may call each other. Python runs it at every call, so prints, breaks and other
    side effects happen each time.

    Args:
        func: the function; without it, a decorator is returned.
        input_signature: a list or tuple with one spec for each argument that is
            passed: a `TensorSpec`, a distributed dataset's `element_spec`, or a
            nested structure of them. Calls are checked against it, and numbers,
            lists and arrays become tensors. None checks nothing.
        autograph: no effect; Python's control flow is kept as it is.
        jit_compile: no effect.
        reduce_retracing: no effect.

    Returns:
        The function that takes the place of `func`.

    Raises:
        TypeError: if `func` is not callable or `input_signature` is no sequence of
            specs; at a call, if arguments do not fit the signature.

    Example:

    >>> import torch, keras_distrib
    >>> @keras_distrib.function(input_signature=[keras_distrib.TensorSpec([None], "float32")])
    ... def double(x):
    ...     return 2 * x
    >>> double([1.0, 2.0])
    tensor([2., 4.])
    """
    del autograph, jit_compile, reduce_retracing
    if input_signature is not None:
        _check_signature(input_signature)
    if func is None:
        return functools.partial(function, input_signature=input_signature)
    if not callable(func) and not hasattr(func, "__get__"):
        raise TypeError(f"{func!r} is not a callable object. Received: func={func!r}. Decorate a function with it.")
    return Function(func, input_signature)


def _check_signature(input_signature: Any) -> None:
    if not isinstance(input_signature, list | tuple):
        raise TypeError(
            f"input_signature must be either a tuple or a list, got {type(input_signature)}. "
            f"Received: input_signature={input_signature!r}. Pass a list with one spec for each argument."
        )
    wrong = [leaf for leaf in leaves(input_signature) if not is_spec(leaf)]
    if wrong:
        raise TypeError(
            f"input_signature must be a possibly nested sequence of TensorSpec objects, got invalid args {wrong} "
            f"with types {[type(leaf) for leaf in wrong]}. Received: input_signature={input_signature!r}. "
            "Pass `keras_distrib.TensorSpec` objects or a distributed dataset's `element_spec`."
        )

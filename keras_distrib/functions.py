"""`function`: marks a step or a loop as one computation, with a checked signature."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, overload

from keras_distrib.capture.steps import CapturedStep
from keras_distrib.specs import conform, is_spec
from keras_distrib.values import leaves

MOST_STEPS = 16  # that one function has captured for a strategy at a time


class _Running(threading.local):
    """The outermost function that the calling thread runs."""

    function: Function | None = None


_running = _Running()


def captured_step(strategy: Any, fn: Callable[..., Any]) -> CapturedStep | None:
    """What captures a step that is to run on a strategy's replicas; None if it runs as it is.

    Steps are captured that are a `function`, or are run in one.
    """
    owner = fn if isinstance(fn, Function) else _running.function
    return None if owner is None else owner.captured(strategy, fn)


class _Weakly:
    """Calls a function without keeping it."""

    def __init__(self, fn: Function) -> None:
        python_function = fn.python_function
        # A method's function is bound anew at each access: here its own lasts.
        self._get = (lambda: fn) if isinstance(python_function, types.MethodType) else weakref.ref(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fn = self._get()
        if fn is None:
            raise RuntimeError("A captured step's function is gone. Keep it as long as its steps run.")
        return fn(*args, **kwargs)


def _identity(fn: Any) -> Any:
    """The same for functions that are made anew by each call of an outer one, as long as they do the same."""
    if isinstance(fn, Function):
        return _identity(fn.python_function)
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), _identity(fn.__func__)
    if not isinstance(fn, types.FunctionType):
        return id(fn)
    cells = tuple(_cell_identity(cell) for cell in fn.__closure__ or ())
    defaults = tuple(_by_value(value) for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()))
    return fn.__code__, id(fn.__globals__), cells, defaults


def _cell_identity(cell: types.CellType) -> Any:
    try:
        return _by_value(cell.cell_contents)
    except ValueError:  # empty
        return None


def _by_value(value: Any) -> Any:
    is_simple = value is None or isinstance(value, bool | int | float | complex | str | bytes)
    return (type(value), value) if is_simple else id(value)


class Function:
    """A Python function with a signature that its arguments are checked against.

    Make one with `keras_distrib.function`. Methods bind as those of plain
    functions do.

    Attributes:
        python_function: the function as it was written.
        input_signature: a tuple of specs, one for each argument that is passed;
            None if calls are not checked.
    """

    def __init__(
        self,
        python_function: Callable[..., Any],
        input_signature: Sequence[Any] | None = None,
        jit_compile: bool | None = None,
    ) -> None:
        self.python_function = python_function
        self.input_signature = None if input_signature is None else tuple(input_signature)
        self.jit_compile = jit_compile
        self._root = self  # what this function is bound from, if it is a method
        functools.update_wrapper(self, python_function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.input_signature is not None:
            args, kwargs = self._checked(args, kwargs)
        outer, _running.function = _running.function, _running.function or self
        try:
            return self.python_function(*args, **kwargs)
        finally:
            _running.function = outer

    def captured(self, strategy: Any, fn: Callable[..., Any]) -> CapturedStep | None:
        """What captures a step that is run by this function, or is this function; None if nothing does.

        Args:
            strategy: on whose replicas it runs.
            fn: the step.
        """
        if self.jit_compile is False:
            return None
        # The strategy keeps them, and lets go of those whose function is gone.
        steps: dict[Any, CapturedStep] = strategy.captured_steps.setdefault(self._root, {})
        key = _identity(fn)
        step = steps.pop(key, None)
        if step is None:
            name = f"The step {getattr(fn, '__qualname__', fn)!r}"
            target = _Weakly(fn) if isinstance(fn, Function) else fn
            step = CapturedStep(strategy, target, name, compiles=bool(self.jit_compile))
            while len(steps) >= MOST_STEPS:
                steps.pop(next(iter(steps)), None)
        steps[key] = step  # the latest used is the last
        return step

    def __get__(self, instance: Any, owner: type | None = None) -> Function:
        bare = isinstance(self.python_function, classmethod | staticmethod)
        if (instance is None and not bare) or not hasattr(self.python_function, "__get__"):
            return self
        bound = Function(self.python_function.__get__(instance, owner), self.input_signature, self.jit_compile)
        bound._root = self._root
        return bound

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
    may call each other. A step that `Strategy.run` is given, marked or called in a
    marked function, is captured: after some calls it is a graph that is replayed, without
    its Python. If that would not do the same, it stays as it is, and the log says
    why. What is around it, such as loops and prints, Python runs at every call.

    Args:
        func: the function; without it, a decorator is returned.
        input_signature: a list or tuple with one spec for each argument that is
            passed: a `TensorSpec`, a distributed dataset's `element_spec`, or a
            nested structure of them. Calls are checked against it, and numbers,
            lists and arrays become tensors. None checks nothing.
        autograph: no effect; Python's control flow is kept as it is.
        jit_compile: whether steps are captured, see below, and compiled. None captures
            them, True also makes machine code of them, False runs them as they are.
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
    del autograph, reduce_retracing
    if input_signature is not None:
        _check_signature(input_signature)
    if func is None:
        return functools.partial(function, input_signature=input_signature, jit_compile=jit_compile)
    if not callable(func) and not hasattr(func, "__get__"):
        raise TypeError(f"{func!r} is not a callable object. Received: func={func!r}. Decorate a function with it.")
    return Function(func, input_signature, jit_compile)


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

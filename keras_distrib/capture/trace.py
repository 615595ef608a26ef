"""Tracing one replica's step into a graph.

The step is run once with tensors that have shapes and no values. Every variable
that it touches is an input of the graph, put into the replica's state in place of
its component, so that reads and writes go there; writes stay writes into those
inputs. Nothing that the step does outside of tensors is repeated by a replay, which
`observe` looks after.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from keras_distrib import keras_seam
from keras_distrib.capture.boundaries import Boundaries, CannotCapture
from keras_distrib.capture.graph import Cut, check_constants, cut, generators_of, hoist_early, hoist_random, simplify
from keras_distrib.replicas.state import ReplicaState, current_state
from keras_distrib.values import leaves, map_structure, pack_like

if TYPE_CHECKING:
    from collections.abc import Iterator

# FX's tracer has state of the whole process.
tracing_lock = threading.RLock()


class UnknownVariable(CannotCapture):
    """The step touches a variable that it did not touch when it was observed."""


class NotInGraph(CannotCapture):
    """A part of the step cannot be traced, and is to run as eager code between graphs."""


@dataclass
class Draw:
    """A random generator of the step, to be seeded before each replay.

    Attributes:
        seed: a `SeedGenerator`, an integer, None for the thread's global one.
        device: where it draws.
        of_run: whether it is the replica's one generator for unseeded dropout.
    """

    seed: Any
    device: torch.device
    of_run: bool = False


class Trace(Boundaries):
    """What a step that is being traced does besides computing.

    Attributes:
        draws: the generators that it draws from, in the order of their seeding.
        local_writes: variables of which it writes its replica's own component.
        uses_replica_id: whether it asked which replica it is.

    Args:
        calls: the names of its parts that are eager code; tracing adds to them.
    """

    def __init__(self, calls: set[str] | None = None) -> None:
        super().__init__()
        self.calls = set() if calls is None else calls
        self.draws: list[Draw] = []
        self.generators: list[torch.Generator] = []
        self.local_writes: dict[int, Any] = {}
        self.uses_replica_id = False

    def refuse(self, variable: Any) -> None:
        """Raises: the step touches a variable that is no input of the graph."""
        raise UnknownVariable(f"it touches the variable {variable.path} only now and then")

    def attempt(self, name: str, value: Any, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(value)`, a part of the step that returns nothing, in the graph if it can be traced.

        Raises:
            NotInGraph: if it cannot; the next trace leaves it as eager code.
        """
        if name in self.calls:
            return self.add(name, value, fn, lambda own: None, is_call=True)
        try:
            return fn(value)
        except UnknownVariable:
            raise
        except Exception as error:
            self.calls.add(name)
            raise NotInGraph(f"{name} cannot be traced: {reason_of(error)}") from error

    def cond(
        self,
        tensors: Iterable[torch.Tensor],
        pred: torch.Tensor,
        true_fn: Callable[[], Any],
        false_fn: Callable[[], Any],
    ) -> Any:
        """Computes both branches, and selects by `pred`.

        Args:
            tensors: what stands for the step's variables.
            pred: a boolean scalar.
            true_fn: one branch; gives a structure of tensors.
            false_fn: the other.

        Raises:
            CannotCapture: if a branch does more than compute, or they give different things.
        """
        variables = list(tensors)

        def effects() -> list[int]:
            done = [len(self.draws), len(self.found), len(self.local_writes)]
            return done + [tensor._version for tensor in variables]

        before = effects()
        results = [true_fn(), false_fn()]
        if effects() != before:
            raise CannotCapture("a branch of `cond` writes variables, draws random numbers or meets other replicas")
        (ours, spec), (theirs, other) = (pytree.tree_flatten(result) for result in results)
        if spec != other or not all(_can_select(*pair) for pair in zip(ours, theirs, strict=True)):
            raise CannotCapture("the branches of `cond` give different things, or are differentiated")
        selected = [
            torch.where(pred, own, their) if isinstance(own, torch.Tensor) else own
            for own, their in zip(ours, theirs, strict=True)
        ]
        return pytree.tree_unflatten(selected, spec)

    def generator(self, seed: Any, device: torch.device) -> torch.Generator:
        """The generator that stands for one seeded anew with `seed` at each step."""
        if not (seed is None or isinstance(seed, int) or keras_seam.is_plain_seed_generator(seed)):
            raise CannotCapture(f"it draws seeds from a {type(seed).__name__}")
        return self._add(Draw(seed, device))

    def generator_of_run(self, device: torch.device) -> torch.Generator:
        """The generator that stands for the replica's own for unseeded dropout."""
        for draw, generator in zip(self.draws, self.generators, strict=True):
            if draw.of_run and draw.device == device:
                return generator
        return self._add(Draw(None, device, of_run=True))

    def _add(self, draw: Draw) -> torch.Generator:
        self.draws.append(draw)
        self.generators.append(torch.Generator(draw.device))
        return self.generators[-1]


def _can_select(own: Any, other: Any) -> bool:
    """Whether `torch.where` gives exactly one of two results."""
    if not isinstance(own, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(own) is type(other) and own == other
    is_plain = not own.requires_grad and not other.requires_grad
    return is_plain and (own.dtype, own.shape, own.device) == (other.dtype, other.shape, other.device)


def in_graph_or_eager(name: str, value: Any, fn: Callable[[Any], None]) -> None:
    """Calls `fn(value)`, a part of a step; where a captured step cannot trace it, it is eager code in it."""
    state = current_state()
    if state is None or state.trace is None:
        fn(value)
    else:
        state.trace.attempt(name, value, fn)


@dataclass
class Program:
    """A step as a graph, for every replica that has as many rows.

    Attributes:
        cut: the graph.
        variables: the variables that are its first inputs.
        draws: the random generators that are its last.
        local_writes: the variables of which it writes a replica's own component.
        written_alike: see `ReplicaState.written_alike`.
        replica: the one replica that it is for, or None.
        result: the structure that the step returns, with positions for tensors.
        metrics: the metrics whose results are returned, by position.
        averages_gradients: see `ReplicaState`; for what is eager code.
        gradients: which variables' `.grad` the step leaves, by the position of its output.
    """

    cut: Cut
    variables: list[Any]
    draws: list[Draw]
    local_writes: list[Any]
    written_alike: dict[int, Any]
    replica: int | None
    result: Any
    metrics: dict[int, Any] = field(default_factory=dict)
    averages_gradients: bool = False
    gradients: dict[int, Any] = field(default_factory=dict)

    @property
    def meetings(self) -> tuple[Any, ...]:
        """What all replicas have to agree on."""
        return tuple(part.boundary.kind for part in self.cut.parts if part.boundary is not None)

    @property
    def has_calls(self) -> bool:
        """Whether parts of it are eager code."""
        return any(part.boundary is not None and part.boundary.is_call for part in self.cut.parts)


class _Position:
    """Stands for a tensor in a step's result."""

    def __init__(self, number: int) -> None:
        self.number = number


def trace(
    state: ReplicaState,
    entered: Callable[[], Any],
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    variables: Sequence[Any],
    calls: set[str] | None = None,
    for_compiler: bool = False,
) -> Program:
    """Traces a step of one replica.

    Args:
        state: a new state of the replica.
        entered: gives the context manager in which the replica's step runs.
        fn: the step.
        args: the replica's positional arguments; tensors in them are inputs of the
            graph, all else is constant.
        kwargs: its keyword arguments, likewise.
        variables: the variables that it touches.
        calls: see `Trace`.
        for_compiler: whether segments are to be compiled.

    Returns:
        A `Program`.

    Raises:
        CannotCapture: if the step cannot be replayed.
    """
    notes = state.trace = Trace(calls)
    given = list(leaves((args, kwargs)))
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    components = [component_of(variable, state.index, written=False) for variable in variables]
    # In the place of the gradients that the step before has left in `.grad`.
    trained = [position for position, component in enumerate(components) if component.requires_grad]
    earlier = [torch.empty_like(components[position]) for position in trained]
    found: dict[str, Any] = {}

    def body(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state.state_mapping = {id(v): t for v, t in zip(variables, inputs, strict=False)}
        own = iter(inputs[len(variables) :])
        filled = [next(own) if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
        left = dict(zip(trained, own, strict=True))
        for position, gradient in left.items():
            inputs[position].grad = gradient
        own_args, own_kwargs = pack_like((args, kwargs), filled)
        with entered():
            result = fn(*own_args, **own_kwargs)
        outputs: list[torch.Tensor] = []

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            metric = getattr(leaf, "_keras_distrib_metric", None)
            if metric is not None:
                found.setdefault("metrics", {})[len(outputs)] = metric
            outputs.append(leaf.detach())
            return _Position(len(outputs) - 1)

        found["result"] = map_structure(place, result)
        for position, gradient in left.items():
            new = inputs[position].grad
            if new is not None and new is not gradient:
                found.setdefault("gradients", {})[len(outputs)] = variables[position]
                outputs.append(new.detach())
        return tuple(outputs)

    with tracing_lock:
        try:
            module = make_fx(body, tracing_mode="fake", _allow_non_fake_inputs=True)(*components, *tensors, *earlier)
        except (UnknownVariable, NotInGraph):
            raise
        except Exception as error:
            raise CannotCapture(reason_of(error)) from error
        finally:
            state.state_mapping = {}
            state.trace = None
        simplify(module.graph)
        check_constants(module)
        _drop_inputs(module.graph, len(earlier), "it adds to the gradients that the step before has left in `.grad`")
        _make_inputs(module, notes.generators)
        hoist_early(module.graph, notes.found)
        if for_compiler:
            hoist_random(module.graph)
        return Program(
            cut(module, notes.found, for_compiler),
            list(variables),
            notes.draws,
            list(notes.local_writes.values()),
            state.written_alike,
            state.index if notes.uses_replica_id else None,
            found["result"],
            found.get("metrics", {}),
            state.averages_gradients,
            found.get("gradients", {}),
        )


def component_of(variable: Any, index: int, written: bool) -> torch.Tensor:
    """The tensor of a variable that a replica's captured step reads and writes."""
    if hasattr(variable, "captured_component"):
        return variable.captured_component(index, written)
    return variable._value


def fill(program: Program, outputs: Sequence[torch.Tensor]) -> Any:
    """What the step returns, from the graph's outputs."""
    for number, metric in program.metrics.items():
        outputs[number]._keras_distrib_metric = metric  # type: ignore[attr-defined]
    return map_structure(lambda leaf: outputs[leaf.number] if isinstance(leaf, _Position) else leaf, program.result)


def _drop_inputs(graph: torch.fx.Graph, count: int, reason: str) -> None:
    """Leaves out the last inputs.

    Raises:
        CannotCapture: with the reason, if one is used.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders[len(placeholders) - count :]:
        if node.users:
            raise CannotCapture(reason)
        graph.erase_node(node)


def _make_inputs(module: Any, generators: Sequence[torch.Generator]) -> None:
    """Makes the traced generators inputs, the last ones, in their order."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    by_generator: dict[int, list[Any]] = {}
    for node, generator in generators_of(module):
        by_generator.setdefault(_identity(generator), []).append(node)
    for number, generator in enumerate(generators):
        with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
            placeholder = graph.placeholder(f"generator_{number}")
        placeholder.meta["generator"] = True
        last = [placeholder]
        for node in by_generator.get(_identity(generator), ()):
            node.replace_all_uses_with(placeholder)
            graph.erase_node(node)


def _identity(generator: Any) -> int:
    """The same for all Python objects of one generator."""
    return generator._cdata


def reason_of(error: BaseException) -> str:
    """In words for users why a step could not be traced."""
    text = _message_of(error)
    name = type(error).__name__
    if isinstance(error, CannotCapture):
        return text
    if "DataDependent" in name or "_local_scalar_dense" in text or "data-dependent" in text.lower():
        what = "it uses the value of a tensor in Python, as `.item()`, `float(...)`, `if` and `.numpy()` do"
    elif "Can't call numpy() on Tensor" in text or "numpy" in text.lower():
        what = "it takes a tensor to NumPy"
    else:
        what = f"tracing raised {name}: {text.strip().splitlines()[0] if text.strip() else ''}"[:300]
    return f"{what}{_place_of(error)}"


def _message_of(error: BaseException) -> str:
    """What an error says, without what Keras says around it."""
    text = str(error)
    while (inner := re.search("\x1b\\[1m(.*)\x1b\\[0m", text, re.DOTALL)) is not None:
        text = inner.group(1)
    return text.strip()


def _place_of(error: BaseException) -> str:
    """The line nearest to the error that is neither torch's nor Keras' own."""
    place = ""
    for frame in _frames(error):
        module = frame.f_globals.get("__name__", "")
        if not keras_seam.is_library(module):
            place = f" ({frame.f_code.co_filename}:{frame.f_lineno})"
    return place


def _frames(error: BaseException) -> Iterator[Any]:
    trace_back = error.__traceback__
    while trace_back is not None:
        yield trace_back.tb_frame
        trace_back = trace_back.tb_next

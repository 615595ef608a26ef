"""Tracing one replica's step into a graph.

The step is run once with tensors that have shapes and no values. Every variable
that it touches is an input of the graph, put into the replica's state in place of
its component, so that reads and writes go there; writes stay writes into those
inputs. Nothing that the step does outside of tensors is repeated by a replay, which
`observe` looks after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_distrib import keras_seam
from keras_distrib.capture.boundaries import Boundaries, CannotCapture
from keras_distrib.capture.graph import Cut, check_constants, cut, generators_of, simplify
from keras_distrib.replicas.state import ReplicaState
from keras_distrib.values import leaves, map_structure, pack_like

if TYPE_CHECKING:
    from collections.abc import Iterator

# FX's tracer has state of the whole process.
tracing_lock = threading.RLock()


class UnknownVariable(CannotCapture):
    """The step touches a variable that it did not touch when it was observed."""


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
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self.generators: list[torch.Generator] = []
        self.local_writes: dict[int, Any] = {}
        self.uses_replica_id = False

    def refuse(self, variable: Any) -> None:
        """Raises: the step touches a variable that is no input of the graph."""
        raise UnknownVariable(f"it touches the variable {variable.path} only now and then")

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
    """

    cut: Cut
    variables: list[Any]
    draws: list[Draw]
    local_writes: list[Any]
    written_alike: dict[int, Any]
    replica: int | None
    result: Any
    metrics: dict[int, Any] = field(default_factory=dict)

    @property
    def meetings(self) -> list[str]:
        return [part.boundary.name for part in self.cut.parts if part.boundary is not None]


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

    Returns:
        A `Program`.

    Raises:
        CannotCapture: if the step cannot be replayed.
    """
    notes = state.trace = Trace()
    given = list(leaves((args, kwargs)))
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    components = [component_of(variable, state.index, written=False) for variable in variables]
    found: dict[str, Any] = {}

    def body(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state.state_mapping = {id(v): t for v, t in zip(variables, inputs, strict=False)}
        own = iter(inputs[len(variables) :])
        filled = [next(own) if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
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
        return tuple(outputs)

    with tracing_lock:
        try:
            module = make_fx(body, tracing_mode="fake", _allow_non_fake_inputs=True)(*components, *tensors)
        except CannotCapture:
            raise
        except Exception as error:
            raise CannotCapture(reason_of(error)) from error
        finally:
            state.state_mapping = {}
            state.trace = None
        simplify(module.graph)
        check_constants(module)
        _make_inputs(module, notes.generators)
        module.recompile()
        return Program(
            cut(module, notes.found),
            list(variables),
            notes.draws,
            list(notes.local_writes.values()),
            state.written_alike,
            state.index if notes.uses_replica_id else None,
            found["result"],
            found.get("metrics", {}),
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


def _make_inputs(module: Any, generators: Sequence[torch.Generator]) -> None:
    """Makes the traced generators inputs, the last ones, in their order."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    by_generator: dict[int, list[Any]] = {}
    for node in generators_of(module):
        by_generator.setdefault(getattr(module, node.target)._cdata, []).append(node)
    for number, generator in enumerate(generators):
        with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
            placeholder = graph.placeholder(f"generator_{number}")
        last = [placeholder]
        for node in by_generator.get(generator._cdata, ()):
            node.replace_all_uses_with(placeholder)
            graph.erase_node(node)


def reason_of(error: BaseException) -> str:
    """In words for users why a step could not be traced."""
    text = str(error)
    name = type(error).__name__
    if "DataDependent" in name or "_local_scalar_dense" in text or "data-dependent" in text.lower():
        what = "it uses the value of a tensor in Python, as `.item()`, `float(...)`, `if` and `.numpy()` do"
    elif "Can't call numpy() on Tensor" in text or "numpy" in text.lower():
        what = "it takes a tensor to NumPy"
    else:
        what = f"tracing raised {name}: {text.strip().splitlines()[0] if text.strip() else ''}"[:300]
    return f"{what}{_place_of(error)}"


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

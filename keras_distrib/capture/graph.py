"""A traced step as segments, cut where replicas meet and where Python runs.

Values live in numbered slots: first the step's inputs, then what segments and
boundaries leave to later ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from keras_distrib.capture.boundaries import OPERATOR, Boundary, CannotCapture

aten = torch.ops.aten
_SAME_STORAGE = (aten.detach.default, aten.alias.default)


@dataclass
class Segment:
    """A part of a step that is one graph.

    Attributes:
        module: the graph; gives a tuple.
        call: what runs it.
        inputs: slots it reads.
        outputs: slots it fills.
        compiles: whether a compiler can take it.
    """

    module: fx.GraphModule
    call: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    compiles: bool = True

    def run(self, slots: list[Any]) -> None:
        results = self.call(*[slots[number] for number in self.inputs])
        for number, value in zip(self.outputs, results, strict=True):
            slots[number] = value

    def examples(self) -> list[Any]:
        """Tensors without values like those that it reads."""
        return [node.meta["val"] for node in self.module.graph.nodes if node.op == "placeholder"]


@dataclass
class Part:
    """A segment and the boundary at its end, if any.

    Attributes:
        segment: what each replica runs, or one of them for all.
        once: whether one runs it for all.
        boundary: what follows it.
        brought: slots of the tensors that go into the boundary.
        taken: slots that its results fill.
        freed: slots that nobody reads after it.
    """

    segment: Segment
    once: bool
    boundary: Boundary | None
    brought: tuple[int, ...]
    taken: tuple[int, ...]
    freed: tuple[int, ...] = ()


@dataclass
class Cut:
    """A whole step.

    Attributes:
        parts: in order.
        size: how many slots there are.
        outputs: slots of the step's results.
        constants: what else is in slots from the start.
    """

    parts: list[Part]
    size: int
    outputs: tuple[int, ...]
    constants: dict[int, torch.Tensor]


def simplify(graph: fx.Graph) -> None:
    """Leaves out operations that give their input again, or that nobody uses."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SAME_STORAGE:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or _is_mutable(node))


def hoist_early(graph: fx.Graph, boundaries: Sequence[Boundary]) -> None:
    """Moves boundaries that are `early` to right after the last operation that they wait for."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    latest = -1
    for node in [node for node in graph.nodes if node.target is OPERATOR]:
        if not boundaries[node.args[1]].early:
            latest = order[node]
            continue
        inputs = node.all_input_nodes
        last = max(inputs, key=lambda own: order[own], default=None)
        place = -1 if last is None else order[last]
        mutated = any(_is_mutable(user) and order[user] > place for own in inputs for user in own.users)
        if last is None or mutated or place < latest or last.op == "placeholder":
            latest = order[node]
            continue
        last.append(node)
        # What is moved behind one operation keeps its order.
        order[node] = order[last]
        latest = max(latest, order[node])


def hoist_random(graph: fx.Graph) -> None:
    """Moves what random operations that depend on no data need to the front, in their order.

    A compiler takes no random generators, and the rest of the graph stays in one piece.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if not placeholders:
        return
    free: dict[fx.Node, bool] = {}

    def is_free(node: fx.Node) -> bool:
        if node not in free:
            if node.op == "placeholder":
                free[node] = _is_generator(node)
            else:
                mutable = _is_mutable(node) or any(_is_mutable(user) for user in node.users)
                is_plain = node.op == "call_function" and node.target is not OPERATOR and not mutable
                free[node] = is_plain and all(is_free(own) for own in node.all_input_nodes)
        return free[node]

    moved: dict[fx.Node, None] = {}

    def take(node: fx.Node) -> None:
        if node.op == "placeholder" or node in moved:
            return
        for own in node.all_input_nodes:
            take(own)
        moved[node] = None

    for node in graph.nodes:
        if not is_random(node):
            continue
        if not is_free(node):
            break  # what follows draws after it
        take(node)
    last = placeholders[-1]
    for node in moved:
        last.append(node)
        last = node


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws from a random generator."""
    return node.op == "call_function" and any(_is_generator(own) for own in node.all_input_nodes)


def _is_generator(node: fx.Node) -> bool:
    return bool(node.meta.get("generator"))


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def generators_of(module: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """The nodes that stand for random generators, with them."""
    found = [(node, constant_of(module, node)) for node in module.graph.nodes if node.op == "get_attr"]
    return [(node, value) for node, value in found if isinstance(value, torch.Generator)]


def constant_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """What a `get_attr` node stands for."""
    return operator.attrgetter(str(node.target))(module)


def check_constants(module: fx.GraphModule) -> None:
    """Raises if the graph trains or writes tensors that are no inputs.

    Raises:
        CannotCapture: for such a tensor.
    """
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = constant_of(module, node)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise CannotCapture("it uses a trainable tensor that is no Keras variable")
        elif _is_mutable(node) and any(written.op == "get_attr" for written in _written(node)):
            raise CannotCapture("it writes into a tensor that is no Keras variable")


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """What an operation writes into."""
    schema = node.target._schema  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write or position >= len(node.args):
            continue
        given = node.args[position]
        for own in given if isinstance(given, list | tuple) else (given,):
            if isinstance(own, fx.Node):
                yield own


def cut(module: fx.GraphModule, boundaries: Sequence[Boundary], for_compiler: bool = False) -> Cut:
    """Cuts a graph at its boundaries into segments of their own.

    Args:
        module: the whole step; its placeholders are the first slots.
        boundaries: what the boundary nodes' numbers stand for.
        for_compiler: whether what a compiler cannot take gets segments of its own.
    """
    return _Cutter(module, boundaries, for_compiler).cut()


class _Group:
    """Operations that become one segment."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.nodes: list[fx.Node] = []
        self.meeting: fx.Node | None = None  # the boundary at its end


class _Cutter:
    def __init__(self, module: fx.GraphModule, boundaries: Sequence[Boundary], for_compiler: bool) -> None:
        self.module = module
        self.boundaries = boundaries
        self.for_compiler = for_compiler
        self.constants: dict[int, torch.Tensor] = {}
        self.slots: dict[fx.Node, int] = {}
        self.size = 0

    def slot(self, node: fx.Node) -> int:
        if node not in self.slots:
            self.slots[node] = self.size
            self.size += 1
        return self.slots[node]

    def cut(self) -> Cut:
        groups, outputs = self._groups()
        where = {node: number for number, group in enumerate(groups) for node in (*group.nodes, group.meeting)}
        parts, once = [], False
        for number, group in enumerate(groups):
            boundary, brought = None, []
            if group.meeting is not None:
                tensors, position = group.meeting.args
                boundary, brought = self.boundaries[position], list(tensors)  # type: ignore[arg-type, index]
            crossing = [
                node
                for node in group.nodes
                if node in brought or node in outputs or any(where.get(user, number) != number for user in node.users)
            ]
            if once and crossing:
                raise CannotCapture("a value of the optimizer's one update for all replicas is used after it")
            segment = self._segment(group, crossing)
            taken: tuple[int, ...] = ()
            if boundary is not None and group.meeting is not None:
                by_position = {user.args[1]: user for user in group.meeting.users}
                taken = tuple(self.slot(by_position[i]) if i in by_position else -1 for i in range(boundary.results))
            parts.append(Part(segment, once, boundary, tuple(self._value(node) for node in brought), taken))
            once = once if boundary is None else boundary.once
        chosen = tuple(self._value(node) for node in outputs)
        self._free(parts, set(chosen), sum(node.op == "placeholder" for node in self.module.graph.nodes))
        return Cut(parts, self.size, chosen, self.constants)

    def _groups(self) -> tuple[list[_Group], list[fx.Node]]:
        """The operations in groups, and the step's results."""
        groups = [_Group()]
        outputs: list[fx.Node] = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.slot(node)
            elif node.op == "output":
                outputs = [argument for argument in node.args[0] if isinstance(argument, fx.Node)]
            elif node.target is OPERATOR:
                groups[-1].meeting = node
                groups.append(_Group())
            elif node.target is operator.getitem and node.args[0].target is OPERATOR:
                continue
            elif node.op != "get_attr":
                compiles = not self.for_compiler or _compiles(node)
                if compiles != groups[-1].compiles:
                    if groups[-1].nodes:
                        groups.append(_Group(compiles))
                    groups[-1].compiles = compiles
                groups[-1].nodes.append(node)
        return groups, outputs

    def _value(self, node: fx.Node) -> int:
        if node.op == "get_attr":
            self.constants[self.slot(node)] = constant_of(self.module, node)
        return self.slots[node]

    def _segment(self, group: _Group, crossing: list[fx.Node]) -> Segment:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        inputs: list[fx.Node] = []
        members = set(group.nodes)
        for node in group.nodes:
            for used in node.all_input_nodes:
                if used not in members and used not in inputs and used.op != "get_attr":
                    inputs.append(used)
        for used in inputs:
            copies[used] = graph.placeholder(used.name)
            copies[used].meta = used.meta
        for node in group.nodes:
            for used in node.all_input_nodes:
                if used.op == "get_attr" and used not in copies:
                    copies[used] = graph.get_attr(str(used.target))
                    copies[used].meta = used.meta
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[node] for node in crossing))
        module = fx.GraphModule(self.module, graph)
        reads = tuple(self._value(node) for node in inputs)
        return Segment(module, module.forward, reads, tuple(self.slot(node) for node in crossing), group.compiles)

    @staticmethod
    def _free(parts: list[Part], kept: set[int], inputs: int) -> None:
        """Says after which part each slot is read no more."""
        last: dict[int, int] = {}
        for number, part in enumerate(parts):
            for slot in (*part.segment.inputs, *part.segment.outputs, *part.brought, *part.taken):
                if slot >= inputs and slot not in kept:
                    last[slot] = number
        for number, part in enumerate(parts):
            part.freed = tuple(slot for slot, end in last.items() if end == number)


def _compiles(node: fx.Node) -> bool:
    """Whether a compiler can take an operation: none that draws, none that gives a number."""
    return not is_random(node) and not isinstance(node.meta.get("val", ()), int | float | bool | torch.SymInt)

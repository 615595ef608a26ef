"""A traced step as segments, cut where replicas meet.

Values live in numbered slots: first the step's inputs, then what segments and
meetings leave to later ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from keras_distrib.capture.boundaries import OPERATOR, Boundary, CannotCapture

aten = torch.ops.aten
_SAME_STORAGE = (aten.detach.default, aten.alias.default)


@dataclass
class Segment:
    """A part of a step in which no replicas meet.

    Attributes:
        module: the graph; gives a tuple.
        call: what runs it.
        inputs: slots it reads.
        outputs: slots it fills.
    """

    module: fx.GraphModule
    call: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def run(self, slots: list[Any]) -> None:
        results = self.call(*[slots[number] for number in self.inputs])
        for number, value in zip(self.outputs, results, strict=True):
            slots[number] = value


@dataclass
class Part:
    """A segment and the meeting at its end, if any.

    Attributes:
        segment: what each replica runs, or one of them for all.
        once: whether one runs it for all.
        boundary: the meeting.
        brought: slots of the tensors that go into it.
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
    """

    parts: list[Part]
    size: int
    outputs: tuple[int, ...]


def simplify(graph: fx.Graph) -> None:
    """Leaves out operations that give their input again."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SAME_STORAGE:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=_is_impure)


def _is_impure(node: fx.Node) -> bool:
    if node.is_impure():
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def generators_of(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that stand for random generators."""
    nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
    return [node for node in nodes if isinstance(getattr(module, node.target), torch.Generator)]


def check_constants(module: fx.GraphModule) -> None:
    """Raises if the graph reads or writes tensors that are no inputs in a way that a replay would not repeat.

    Raises:
        CannotCapture: for a constant that is trained or written.
    """
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, node.target)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise CannotCapture("it uses a trainable tensor that is no Keras variable")
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for argument in node.target._schema.arguments:
                written = argument.alias_info is not None and argument.alias_info.is_write
                position = node.target._schema.arguments.index(argument)
                if not written or position >= len(node.args):
                    continue
                for own in fx.node.map_aggregate((node.args[position],), lambda a: a):
                    for leaf in own if isinstance(own, list | tuple) else (own,):
                        if isinstance(leaf, fx.Node) and leaf.op == "get_attr":
                            raise CannotCapture("it writes into a tensor that is no Keras variable")


def cut(module: fx.GraphModule, boundaries: Sequence[Boundary]) -> Cut:
    """Cuts a graph at its boundaries into segments of their own.

    Args:
        module: the whole step; its placeholders are the first slots.
        boundaries: what the boundary nodes' numbers stand for.
    """
    return _Cutter(module, boundaries).cut()


class _Cutter:
    def __init__(self, module: fx.GraphModule, boundaries: Sequence[Boundary]) -> None:
        self.module = module
        self.boundaries = boundaries
        self.slots: dict[fx.Node, int] = {}
        self.size = 0

    def slot(self, node: fx.Node) -> int:
        if node not in self.slots:
            self.slots[node] = self.size
            self.size += 1
        return self.slots[node]

    def cut(self) -> Cut:
        groups: list[list[fx.Node]] = [[]]
        meetings: list[fx.Node] = []
        where: dict[fx.Node, int] = {}
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.slot(node)
                where[node] = -1
            elif node.op == "output":
                output = node
            elif node.target is OPERATOR:
                meetings.append(node)
                groups.append([])
            elif node.target is operator.getitem and node.args[0] in meetings:
                where[node] = -1
            elif node.op != "get_attr":
                groups[-1].append(node)
                where[node] = len(groups) - 1
        outputs = [argument for argument in output.args[0] if isinstance(argument, fx.Node)]
        parts, once = [], False
        for number, group in enumerate(groups):
            boundary = self.boundaries[meetings[number].args[1]] if number < len(meetings) else None
            brought = list(meetings[number].args[0]) if number < len(meetings) else []
            needed = set(brought if boundary else ()) | (set(outputs) if number == len(groups) - 1 else set())
            crossing = [
                node
                for node in group
                if node in needed or node in outputs or any(self._elsewhere(user, number, where) for user in node.users)
            ]
            if once and crossing:
                raise CannotCapture("a value of the optimizer's one update for all replicas is used after it")
            segment = self._segment(group, crossing)
            taken = ()
            if boundary is not None:
                by_position = {user.args[1]: user for user in meetings[number].users}
                taken = tuple(
                    self.slot(by_position[i]) if i in by_position else -1 for i in range(boundary.results)
                )
            parts.append(Part(segment, once, boundary, tuple(self._value(n) for n in brought), taken))
            once = boundary is not None and boundary.once
        chosen = tuple(self._value(node) for node in outputs)
        self._free(parts, set(chosen), sum(node.op == "placeholder" for node in self.module.graph.nodes))
        return Cut(parts, self.size, chosen)

    @staticmethod
    def _elsewhere(user: fx.Node, number: int, where: dict[fx.Node, int]) -> bool:
        return where.get(user, number) not in (number, -1)

    def _value(self, node: Any) -> int:
        if node not in self.slots:
            raise CannotCapture("replicas reduce, or a step returns, a constant")
        return self.slots[node]

    def _segment(self, group: list[fx.Node], crossing: list[fx.Node]) -> Segment:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        inputs: list[fx.Node] = []
        members = set(group)
        for node in group:
            for used in node.all_input_nodes:
                if used in members or used in copies:
                    continue
                if used.op == "get_attr":
                    copies[used] = graph.get_attr(str(used.target))
                    copies[used].meta = used.meta
                else:
                    inputs.append(used)
                    copies[used] = used  # replaced below
        # Placeholders come first in a graph.
        first = next(iter(graph.nodes), None)
        with graph.inserting_before(first) if first is not None else graph.inserting_after():
            for used in inputs:
                copies[used] = graph.placeholder(used.name)
                copies[used].meta = used.meta
        for node in group:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[node] for node in crossing))
        module = fx.GraphModule(self.module, graph)
        return Segment(
            module,
            module.forward,
            tuple(self._value(node) for node in inputs),
            tuple(self.slot(node) for node in crossing),
        )

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


"""Where a captured step leaves its graph: to meet the other replicas, or to run Python.

While a step is traced nobody else is there: a meeting becomes a node of the
graph, the custom operator `keras_distrib::boundary`, whose results have the shapes
that the meeting will give. The graph is cut there into segments, and when the step
is replayed the meeting takes place between two of them. What goes in and comes out
is a structure of tensors; all else in it is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree


class CannotCapture(Exception):
    """Says why a step cannot be replayed from a graph."""


@dataclass
class Boundary:
    """One place where a captured step leaves its graph.

    Attributes:
        name: what happens there, the same on all replicas.
        action: from all replicas' values to each one's result; where `is_call`, from
            one replica's value to its result.
        value: the structure that a replica brings.
        constants: what it holds in the place of tensors' leaves, `TENSOR` for a tensor.
        results: how many tensors are in what a replica takes away.
        once: whether the segment after it acts for all replicas, and runs once.
        early: whether it takes place as soon as what goes in is there.
        is_call: whether each replica calls the action by itself, as eager code.
    """

    name: str
    action: Callable[[Any], Any]
    value: pytree.TreeSpec
    constants: list[Any]
    results: int
    once: bool = False
    early: bool = False
    is_call: bool = False

    def pack(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What a replica brings, from the tensors in it."""
        rest = iter(tensors)
        leaves = [next(rest) if constant is TENSOR else constant for constant in self.constants]
        return pytree.tree_unflatten(leaves, self.value)

    @staticmethod
    def unpack(result: Any) -> list[torch.Tensor]:
        """The tensors of what a replica takes away."""
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What all replicas have to agree on."""
        tensors = tuple(constant is TENSOR for constant in self.constants)
        return self.name, self.value, tensors, self.results, self.once


TENSOR = object()
_results: list[list[torch.Tensor]] = []


# Tagged as if it drew random numbers: tracing would run it at once on tensors whose values it knows.
@torch.library.custom_op("keras_distrib::boundary", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def boundary_op(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    raise RuntimeError("A boundary is where a captured step is cut; it does not run by itself.")


@boundary_op.register_fake
def _boundary_results(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    del tensors, number
    return _results[-1]


OPERATOR = torch.ops.keras_distrib.boundary.default
has_side_effect(OPERATOR)


class Boundaries:
    """The boundaries of a step that is being traced."""

    def __init__(self) -> None:
        self.found: list[Boundary] = []

    def add(
        self,
        name: str,
        value: Any,
        action: Callable[[Any], Any],
        result: Callable[[Any], Any] | None,
        **kind: bool,
    ) -> Any:
        """Notes a boundary, and gives tensors that stand for its result.

        Args:
            name: what happens there.
            value: what the replica brings.
            action: what happens, see `Boundary`.
            result: from the value to a structure of new tensors like the result's.
            **kind: `once`, `early` and `is_call`, see `Boundary`.

        Raises:
            CannotCapture: if it is not known what comes out.
        """
        if result is None:
            raise CannotCapture(f"it takes part in {name}")
        leaves, spec = pytree.tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        with torch.no_grad(), disable_proxy_modes_tracing():
            like = result(value)
        shapes, result_spec = pytree.tree_flatten(like)
        stand_ins = [leaf for leaf in shapes if isinstance(leaf, torch.Tensor)]
        self.found.append(Boundary(name, action, spec, constants, len(stand_ins), **kind))
        _results.append(stand_ins)
        try:
            made = iter(OPERATOR(tensors, len(self.found) - 1))
        finally:
            _results.pop()
        filled = [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in shapes]
        return pytree.tree_unflatten(filled, result_spec)

"""What one replica reads, writes, draws and counts in one step.

This is the one interface to a replica's state. Eager steps use it in place:
reads give the replica's own tensor of each variable, writes go into it. A
captured step puts tensors of its own into `state_mapping`, and reads and writes
go there instead. It is a `keras.StatelessScope`, so Keras' own code in a step
comes here without knowing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from keras_distrib import context, keras_seam
from keras_distrib.devices import Device

if TYPE_CHECKING:
    from keras_distrib.capture.trace import Trace
    from keras_distrib.strategy import Strategy


class ReplicaVariable(Protocol):
    """A variable that has a tensor for each replica."""

    def read_in_replica(self, state: ReplicaState) -> torch.Tensor: ...

    def write_in_replica(self, state: ReplicaState, value: torch.Tensor) -> None: ...


class ReplicaState(keras_seam.StatelessScope):
    """The state of one replica while it runs a step.

    Attributes:
        strategy: the strategy that runs it.
        index: the replica's index on this machine.
        replica_id: its id among all replicas in sync.
        device: the device it computes on.
        rows: rows of its part of the batch; None if the batch was not counted.
        global_rows: rows of the whole batch; None likewise.
        first_row: where its part begins in the batch; None likewise.
        is_counted: whether the step got a batch that the strategy split; rows are
            None all the same where it got several of different sizes.
        share: its part of a mean over the whole batch: rows / global_rows, or
            one part of the replicas that run where rows are unknown.
        num_active: how many replicas run this step.
        averages_gradients: whether the step is written as for one device, with
            losses that are means over its own rows: gradients are then averaged
            by the shares, instead of losses scaled and gradients summed. So it
            is in `Model.fit`.
        torch_modules: the wrapped torch modules that the step has called.
        written: the variables, of aggregation `none`, that the step has written as
            its replica's own.
        set_attributes: the layers whose attributes the step has set, by layer and
            attribute.
        trace: what notes the step while it is traced into a graph; None in eager steps.
        touched: the variables that the step has read or written, where it is observed.
        written_alike: the trainable variables that the step has written itself.
        in_update: whether an optimizer is applying reduced gradients, so that
            writes stay on this replica.
    """

    is_replica_state = True

    def __init__(
        self,
        strategy: Strategy,
        index: int,
        replica_id: int,
        device: Device,
        num_active: int,
        rows: int | None,
        global_rows: int | None,
        first_row: int | None = None,
        is_counted: bool = False,
    ) -> None:
        # The base class' constructor converts a mapping that is not needed here.
        self.collect_losses = True
        self.initialize_variables = False
        self.losses: list[torch.Tensor] = []
        self.state_mapping: dict[int, torch.Tensor] = {}
        self.strategy = strategy
        self.index = index
        self.replica_id = replica_id
        self.device = device
        self.num_active = num_active
        self.rows = rows
        self.global_rows = global_rows
        self.first_row = first_row
        self.is_counted = is_counted
        self.share = rows / global_rows if rows is not None and global_rows else 1.0 / num_active
        self.averages_gradients = False
        self.in_update = False
        self.loss_is_builtin = False
        self.loss_is_global = False
        self.torch_modules: dict[int, Any] = {}
        self.written: dict[int, Any] = {}
        self._losses_by_layer: dict[int, list[torch.Tensor]] = {}
        self._layer_attributes: dict[tuple[int, str], Any] = {}
        self.set_attributes: dict[tuple[int, str], Any] = {}
        self.written_alike: dict[int, Any] = {}
        self.trace: Trace | None = None
        self.touched: dict[int, Any] | None = None

    def get_current_value(self, variable: Any) -> torch.Tensor:
        """This replica's tensor of a variable."""
        value = self.state_mapping.get(id(variable))
        if value is not None:
            return value
        if self.trace is not None:
            self.trace.refuse(variable)
        if self.touched is not None:
            self.touched[id(variable)] = variable
        if hasattr(variable, "read_in_replica"):
            if variable.strategy is not self.strategy:
                context.require_same_strategy(variable.strategy)
            return variable.read_in_replica(self)
        return variable._value

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        """Writes a variable's new value into this replica's tensor."""
        variable, value = update
        if self.touched is not None:
            self.touched[id(variable)] = variable
        if hasattr(variable, "write_in_replica"):
            variable.write_in_replica(self, value)
        else:
            copy_into(self.writable(variable, lambda: variable._value), value)

    def writable(self, variable: Any, component: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor that the replica writes alone: `component()`, or what stands for it in a graph."""
        if self.trace is None:
            return component()
        if id(variable) not in self.state_mapping:
            self.trace.refuse(variable)
        self.trace.local_writes[id(variable)] = variable
        return self.state_mapping[id(variable)]

    def note_touched(self, variables: Iterable[Any]) -> None:
        """Notes, in an observed step, variables that were touched for all replicas."""
        if self.touched is not None:
            self.touched.update((id(variable), variable) for variable in variables)

    def note_write(self, variable: Any) -> None:
        """Notes that a variable's component is the replica's own now."""
        if hasattr(variable, "note_written"):
            variable.note_written(self)

    def layer_losses(self, layer: Any) -> list[torch.Tensor]:
        """The `add_loss` values of one layer in this replica's step."""
        return self._losses_by_layer.setdefault(id(layer), [])

    def layer_attributes(self) -> dict[tuple[int, str], Any]:
        """What layers keep in Python attributes during a call, by layer and name."""
        return self._layer_attributes

    @contextlib.contextmanager
    def taking(self, **flags: bool) -> Iterator[None]:
        """While a loss is computed: `loss_is_builtin`, or `loss_is_global`."""
        outer = {name: getattr(self, name) for name in flags}
        self.__dict__.update(flags)
        try:
            yield
        finally:
            self.__dict__.update(outer)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """While an optimizer applies gradients that are reduced already."""
        self.in_update = True
        try:
            yield
        finally:
            self.in_update = False


def current_state() -> ReplicaState | None:
    """The state of the replica whose step the calling thread runs."""
    scope = keras_seam.get_stateless_scope()
    return scope if isinstance(scope, ReplicaState) else None


def copy_into(target: torch.Tensor, value: Any) -> None:
    """Copies in place, outside of autograd: the leaf stays the leaf."""
    with torch.no_grad():
        target.copy_(value)

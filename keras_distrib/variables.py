"""The variables that a strategy's scope creates in place of `keras.Variable`.

A distributed variable is one `keras.Variable` with a *component* per local
replica. In replica context it reads and writes that replica's component; in
cross-replica context it stands for all of them. The three kinds differ in what
that means:

* `MirroredVariable`: components are kept equal; reading gives the value. State
  that layers write with aggregation `none` in a step (batch norm's statistics)
  may differ meanwhile; reading then gives the mean over the replicas that wrote.
* `SyncOnReadVariable`: each replica accumulates its own; reading aggregates.
* `CentralVariable`: one tensor on the parameter device; each replica reads it
  through a leaf of its own, so that gradients stay apart.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from keras_distrib import context, keras_seam
from keras_distrib.capture.boundaries import CannotCapture
from keras_distrib.comm.collectives import reduce_lists
from keras_distrib.options import ReduceOp
from keras_distrib.replicas.runner import creation_key
from keras_distrib.replicas.state import ReplicaState, copy_into, current_state
from keras_distrib.values import DistributedValues

if TYPE_CHECKING:
    from keras_distrib.strategy import Strategy

_ARGUMENTS = (
    "initializer",
    "shape",
    "dtype",
    "trainable",
    "autocast",
    "aggregation",
    "synchronization",
    "name",
    "layout",
)


class DistributedVariable(keras_seam.Variable):
    """Base class; see the module's docstring for the kinds there are.

    Attributes:
        components: one tensor per local replica, in replica order.
        strategy: the `Strategy` in whose scope it was created.
        writes_are_equal: whether all replicas write the same, so that components
            stay equal although each replica writes its own. Trainable variables
            are taken to be so.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "_strategy" in self.__dict__:
            return  # another replica's step created it; see `new_variable`
        self._strategy = context.get_strategy()
        self._components: tuple[torch.Tensor, ...] = ()
        self._written: set[int] = set()
        self.writes_are_equal = False
        _alive[id(self)] = self
        if len(args) <= _ARGUMENTS.index("name") and kwargs.get("name") is None and _is_own_kind(type(self)):
            kwargs["name"] = keras_seam.auto_name(keras_seam.Variable.__name__)  # Keras names it by its class
        with keras_seam.without_replica_scope():
            super().__init__(*args, **kwargs)

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    @property
    def components(self) -> tuple[torch.Tensor, ...]:
        return self._components

    @property
    def raw_value(self) -> torch.Tensor:
        """The tensor that torch sees as the layer's parameter: the first replica's, or the shared one."""
        return self._value

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold the value: one per local replica, or the one that they share."""
        return tuple(component.detach() for component in self._components)

    @property
    def value(self) -> Any:
        if keras_seam.is_symbolic() or self._value is None:
            return super().value
        scope = keras_seam.get_stateless_scope()
        value = None if scope is None else scope.get_current_value(self)
        if value is None:
            # No scope, or one within a replica's step that does not map this variable.
            replica = context.running_replica()
            if replica is not None and replica.state is not None:
                value = replica.state.get_current_value(self)
            else:
                context.require_same_strategy(self._strategy)
                value = self.read_across_replicas()
        return self._maybe_autocast(value)

    @property
    def trainable(self) -> bool:
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)
        for component in self._components:
            component.requires_grad = self._trainable

    def assign(self, value: Any) -> Any:
        """Sets the value, on every replica in cross-replica context.

        Args:
            value: a tensor or array of the variable's shape; in cross-replica
                context also a per-replica value, one for each component.

        Returns:
            The assigned value.

        Raises:
            ValueError: if shapes differ, or the kind and aggregation of the
                variable do not allow it here.
            RuntimeError: under another strategy.
        """
        context.require_same_strategy(self._strategy)
        if isinstance(value, DistributedValues) and current_state() is None:
            parts = [self._convert_to_tensor(part, dtype=self._dtype) for part in value.values]
            shapes = [tuple(part.shape) for part in parts]
            if shapes != [tuple(self.shape)] * len(self._components):
                raise ValueError(
                    "A per-replica value must have one component of the variable's shape for each replica. "
                    f"Received: value of shapes {shapes}, variable {self.path} of shape {tuple(self.shape)} on "
                    f"{len(self._components)} replicas."
                )
            self._assign_parts(parts)
            return self.value
        self._refuse_literal_in_sum(value)
        return super().assign(value)

    def assign_add(self, value: Any) -> Any:
        """Adds a value; in replica context what is added is aggregated."""
        return self._assign_delta(value, 1, "assign_add")

    def assign_sub(self, value: Any) -> Any:
        """Subtracts a value; in replica context what is subtracted is aggregated."""
        return self._assign_delta(value, -1, "assign_sub")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        context.require_same_strategy(self._strategy)
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        _alive[id(made)] = made
        made._share_components()
        return made

    def _share_components(self) -> None:
        """Restores what components share, after a copy."""

    def read_in_replica(self, state: ReplicaState) -> torch.Tensor:
        """The component of the replica with that state."""
        return self._components[state.index]

    def write_in_replica(self, state: ReplicaState, value: Any) -> None:
        """What `assign` does in the replica with that state."""
        if not self._stays_local(state):
            self._write_aggregated("assign", value, self._assign_components)
            return
        copy_into(state.writable(self, lambda: self._own_component(state.index)), value)
        if state.in_update:
            return
        if self.writes_are_equal or self.trainable:
            self._write_for_absent(state, value)
            if state.averages_gradients:
                state.written_alike[id(self)] = self
        else:
            self.note_written(state)

    def note_written(self, state: ReplicaState) -> None:
        """Notes that a replica's component is its own now."""
        if self.writes_are_equal or self.trainable:
            return
        self._written.add(state.index)
        if self.aggregation == "none":
            state.written[id(self)] = self

    def captured_component(self, index: int, written: bool) -> torch.Tensor:
        """The tensor that a captured step of a replica reads, and writes if `written`."""
        del written
        return self._components[index]

    def read_across_replicas(self) -> torch.Tensor:
        """The one value that stands for all components."""
        written = sorted(self._written)
        if not written or self.aggregation != "none":
            return self._value
        components = self.components
        if len(written) == 1 or not _is_float(self._dtype):
            return components[written[0]]
        return aggregate([components[index].detach() for index in written], "mean")

    def synchronize(self) -> None:
        """Gives every replica the value that reading across replicas gives.

        State that is no number, such as seed counters, stays each replica's own.
        """
        if self._written and self.aggregation == "none" and _is_float(self._dtype):
            self._assign_components(self.read_across_replicas().clone())

    def follow(self, writers: list[int]) -> None:
        """Gives replicas that had no rows what those with rows have written.

        Statistics and counters then go on alike when such a replica has rows again.
        """
        components = self.components
        if not _is_float(self._dtype):
            value = components[writers[0]]
        else:
            value = aggregate([components[index].detach() for index in writers], "mean")
        for index in set(range(len(components))) - set(writers):
            copy_into(self._own_component(index), value)

    def _own_component(self, index: int) -> torch.Tensor:
        """The tensor that a replica writes alone."""
        return self._components[index]

    def _check_options(self) -> None:
        """Raises if synchronization and aggregation make no variable of this kind."""
        if self.aggregation == "mean" and not _is_float(self._dtype):
            raise ValueError(
                "creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype is not supported, "
                f"please use a different aggregation or dtype. Received: dtype={self._dtype}, path={self.path}"
            )

    def _place(self, primary: torch.nn.Parameter) -> tuple[torch.Tensor, ...]:
        """Makes the components from the first one."""
        components = [primary]
        for device in self._strategy.devices[1:]:
            copy = primary.detach().clone().to(device.torch_device)
            components.append(torch.nn.Parameter(copy, requires_grad=primary.requires_grad))
        return tuple(components)

    def _primary_device(self) -> str:
        return str(self._strategy.devices[0].torch_device)

    def _stays_local(self, state: ReplicaState) -> bool:
        """Whether a write in replica context concerns that replica alone."""
        return state.in_update or self.aggregation == "none"

    def _initialize(self, value: Any) -> None:
        self._check_options()
        with keras_seam.device(self._primary_device()):
            super()._initialize(value)
        self._components = self._place(self._value)

    def _initialize_with_initializer(self, initializer: Any) -> None:
        with keras_seam.device(self._primary_device()):
            super()._initialize_with_initializer(initializer)

    def _direct_assign(self, value: Any) -> None:
        self._assign_components(value)

    def _assign_components(self, value: torch.Tensor) -> None:
        for component in self._components:
            copy_into(component, value)
        self._written.clear()

    def _assign_parts(self, parts: list[torch.Tensor]) -> None:
        for component, part in zip(self._components, parts, strict=True):
            copy_into(component, part)
        self._written = set(range(len(parts)))

    def _assign_delta(self, value: Any, sign: int, name: str) -> Any:
        context.require_same_strategy(self._strategy)
        self._refuse_literal_in_sum(value)
        state = current_state()
        if state is None:
            if keras_seam.get_stateless_scope() is not None:
                return self.assign(self.value + value if sign > 0 else self.value - value)
            self._add_to_components(value, sign, name)
        elif self._stays_local(state):
            value = self._convert_to_tensor(value, dtype=self._dtype)
            self.write_in_replica(state, self.value + value if sign > 0 else self.value - value)
        else:
            value = self._convert_to_tensor(value, dtype=self._dtype)
            self._write_aggregated(name, value, lambda delta: self._add_to_components(delta, sign, name))
        return self.value

    def _refuse_literal_in_sum(self, value: Any) -> None:
        """A number in a step's code is one value, and not said to count once for each replica."""
        state = current_state()
        if state is None or self.aggregation != "sum" or self._stays_local(state) or state.num_active == 1:
            return
        if isinstance(value, bool | int | float | np.ndarray | np.generic):
            raise ValueError(
                f"A non-DistributedValues value {value!r} cannot be reduced with the given reduce op ReduceOp.SUM. "
                f'Received: value={value!r}, variable {self.path} with aggregation="sum", in replica context. '
                "Pass a tensor that each replica makes, such as `keras.ops.convert_to_tensor(value)`, to add it up "
                "over replicas, or assign outside of `run`."
            )

    def _add_to_components(self, value: Any, sign: int, name: str) -> None:
        del name
        parts = value.values if isinstance(value, DistributedValues) else [value] * len(self._components)
        for component, part in zip(self._components, parts, strict=True):
            delta = self._convert_to_tensor(part, dtype=self._dtype).to(component.device)
            with torch.no_grad():
                component.add_(delta, alpha=sign)

    def _write_for_absent(self, state: ReplicaState, value: Any) -> None:
        """What all replicas write alike, the first one writes for those without rows."""
        replica = context.running_replica()
        if replica is None or state.index != replica.participants[0]:
            return
        for index in set(range(len(self._components))) - set(replica.participants):
            copy_into(self._components[index], value)

    def _write_aggregated(self, name: str, value: Any, write: Any) -> None:
        """Meets the other replicas, aggregates their values, and writes once for all."""
        replica = context.running_replica()
        if replica is None:
            raise RuntimeError(
                f"`{name}` of {self.path} in replica context needs the replica's own thread. "
                "Assign in the function that `Strategy.run` calls, or in cross-replica context."
            )

        def act(values: list[torch.Tensor]) -> list[None]:
            write(aggregate(values, "only_first_replica" if self.writes_are_equal else self.aggregation))
            return [None] * len(values)

        replica.meet(f"{name} of {self.path}", value.detach(), act, like=lambda own: None)

    def __repr__(self) -> str:
        if not self._components:
            return super().__repr__()
        lines = ",\n".join(
            f"  {index}: <{component.device}: value={keras_seam.to_numpy(component)}>"
            for index, component in enumerate(self._components)
        )
        return f"{type(self).__name__}:{{\n  path={self.path}, shape={self.shape}, dtype={self.dtype}\n{lines}\n}}"


class MirroredVariable(DistributedVariable):
    """One component per replica, kept equal by equal updates."""


class SyncOnReadVariable(DistributedVariable):
    """One component per replica, aggregated when read across replicas."""

    def _stays_local(self, state: ReplicaState) -> bool:
        del state
        return True

    def read_across_replicas(self) -> torch.Tensor:
        if self.aggregation == "none":
            raise ValueError(
                "Could not convert from `tf.VariableAggregation` VariableAggregationV2.NONE to"
                "`tf.distribute.ReduceOp` type: a sync-on-read variable is read across replicas by its aggregation. "
                f'Received: aggregation="none", path={self.path}. '
                'Create it with aggregation="sum", "mean" or "only_first_replica".'
            )
        if len(self._components) == 1:
            return self._components[0]
        components = [component.detach() for component in self._components]
        if self.aggregation == "mean" and self._written:
            components = [components[index] for index in sorted(self._written)]
        return aggregate(components, self.aggregation)

    def _assign_components(self, value: torch.Tensor) -> None:
        count = len(self._components)
        if self.aggregation == "none":
            self.read_across_replicas()  # raises: what cannot be read cannot be set either
        if self.aggregation == "sum" and count > 1:
            # Equal parts; the first also takes what rounding left, so that reading gives the value.
            part = (value / count).to(value.dtype) if _is_float(self._dtype) else value // count
            first = value - part * (count - 1)
            for index, component in enumerate(self._components):
                copy_into(component, part if index else first)
            self._written.clear()
        else:
            super()._assign_components(value)

    def _add_to_components(self, value: Any, sign: int, name: str) -> None:
        if self.aggregation == "sum" and len(self._components) > 1:
            raise ValueError(
                f"SyncOnReadVariable does not support `{name}` in cross-replica context when aggregation is set to "
                f"`tf.VariableAggregation.SUM`. Received: path={self.path}. "
                "Use `assign` with the new total, or call it in the function that `run` calls."
            )
        super()._add_to_components(value, sign, name)


class CentralVariable(DistributedVariable):
    """One tensor on the parameter device, updated with aggregated values.

    State that layers write with aggregation `none` in a step is each replica's
    own from its first such write until the next one across replicas.
    """

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return (self._value.detach(),)

    @property
    def components(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._own.get(index, component) for index, component in enumerate(self._components))

    @property
    def trainable(self) -> bool:
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        DistributedVariable.trainable.fset(self, value)  # type: ignore[attr-defined]
        if self._value is not None:
            self._value.requires_grad = self._trainable

    def read_in_replica(self, state: ReplicaState) -> torch.Tensor:
        own = self._own.get(state.index)
        if own is not None:
            return own
        leaf = self._components[state.index]
        if leaf.device != self._value.device and self._copied_versions[state.index] != self._value._version:
            copy_into(leaf, self._value)
            self._copied_versions[state.index] = self._value._version
        return leaf

    def captured_component(self, index: int, written: bool) -> torch.Tensor:
        leaf = self._components[index]
        if leaf.device != self._value.device:
            raise CannotCapture("its variables are on another device than its replicas")
        if written and self.aggregation == "none" and not self.writes_are_equal and not self.trainable:
            return self._own_component(index)
        return self._own.get(index, leaf)

    def _share_components(self) -> None:
        own = self._own
        self._components = self._place(self._value)
        self._own = own

    def _primary_device(self) -> str:
        return str(self._strategy.parameter_device.torch_device)

    def _place(self, primary: torch.nn.Parameter) -> tuple[torch.Tensor, ...]:
        # On the parameter's own device a replica's leaf shares its storage; elsewhere it is
        # a copy, brought up to date when read.
        self._own: dict[int, torch.Tensor] = {}
        self._copied_versions = [-1] * len(self._strategy.devices)
        components = []
        for device in self._strategy.devices:
            leaf = primary.detach()
            if device.torch_device != primary.device:
                leaf = leaf.clone().to(device.torch_device)
            components.append(leaf.requires_grad_(primary.requires_grad))
        return tuple(components)

    def _stays_local(self, state: ReplicaState) -> bool:
        if state.in_update:  # of a captured step, where one replica's update is that of all
            return True
        if self.aggregation != "none" or self.writes_are_equal:
            return False
        if not self.trainable:
            return True
        raise ValueError(
            "You must specify an aggregation method to update a AggregatingVariable in Replica Context. "
            f'Received: aggregation="none", path={self.path}. Create the variable with aggregation="sum", "mean" '
            'or "only_first_replica", or with trainable=False if each replica may keep its own.'
        )

    def _own_component(self, index: int) -> torch.Tensor:
        if index not in self._own:
            self._own[index] = self._value.detach().to(self._components[index].device, copy=True)
        return self._own[index]

    def _assign_components(self, value: torch.Tensor) -> None:
        copy_into(self._value, value)
        self._own.clear()
        self._written.clear()

    def _assign_parts(self, parts: list[torch.Tensor]) -> None:
        self._assign_components(aggregate(parts, "mean" if _is_float(self._dtype) else "only_first_replica"))

    def _add_to_components(self, value: Any, sign: int, name: str) -> None:
        del name
        if isinstance(value, DistributedValues):
            value = value.values[0]
        for tensor in (self._value, *self._own.values()):
            with torch.no_grad():
                tensor.add_(self._convert_to_tensor(value, dtype=self._dtype).to(tensor.device), alpha=sign)


class GradientAccumulator(SyncOnReadVariable):
    """What an optimizer adds gradients up in: each replica its own, until an update.

    Keras creates it with aggregation `none`; read across replicas it is the sum.
    """

    _holds_sums = False

    @property
    def aggregation(self) -> str:
        return "only_first_replica" if self._holds_sums else "sum"

    def hold_sums(self) -> None:
        """From now on every component is given gradients that are summed already."""
        if not self._holds_sums:
            total = self.read_across_replicas().clone()
            self._holds_sums = True
            self._assign_components(total)

    def _assign_components(self, value: torch.Tensor) -> None:
        for index, component in enumerate(self._components):
            copy_into(component, torch.zeros_like(component) if index and not self._holds_sums else value)


class BatchVariable(CentralVariable):
    """State with one row per row of the global batch, such as a stateful RNN's.

    There is one tensor; each replica reads and writes the rows that it has of the
    batch.
    """

    def captured_component(self, index: int, written: bool) -> torch.Tensor:
        raise CannotCapture("it has state for each row of the batch, as stateful RNNs do")

    def read_in_replica(self, state: ReplicaState) -> torch.Tensor:
        # A copy: the rows are written while what was computed from them is differentiated.
        return self._rows_of(state).to(state.device.torch_device, copy=True)

    def write_in_replica(self, state: ReplicaState, value: Any) -> None:
        copy_into(self._rows_of(state), value)

    def assign(self, value: Any) -> Any:
        state = current_state()
        if state is None:
            return super().assign(value)
        context.require_same_strategy(self._strategy)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        self.write_in_replica(state, value)
        return value

    def _rows_of(self, state: ReplicaState) -> torch.Tensor:
        if state.rows is None and self._strategy.num_replicas_in_sync == 1:
            return self._value.detach()
        if state.rows is None or state.first_row is None or state.global_rows != self.shape[0]:
            raise ValueError(
                "If an RNN is stateful, the batch size of the input sequences must be the same as the batch size of "
                f"the initial state. Received: global batch size={state.global_rows}, state of {self.shape[0]} rows, "
                f"path={self.path}. Feed batches that a strategy splits, all of the size that the model was built "
                "with; drop a smaller last one."
            )
        return self._value.detach()[state.first_row : state.first_row + state.rows]


# The variables that are alive, by identity.
_alive: weakref.WeakValueDictionary[int, DistributedVariable] = weakref.WeakValueDictionary()


def container_of(value: Any) -> Any:
    """The distributed variable that stores a tensor, or the value itself if there is none."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    for variable in list(_alive.values()):
        if any(part.data_ptr() == value.data_ptr() and part.shape == value.shape for part in variable.stored):
            return variable
    return value


def aggregate(values: list[torch.Tensor], aggregation: str) -> torch.Tensor:
    """One value of several, by a Keras aggregation name."""
    if aggregation == "only_first_replica" or len(values) == 1:
        return values[0]
    op = ReduceOp.MEAN if aggregation == "mean" else ReduceOp.SUM
    with torch.no_grad():
        return reduce_lists(op, [[value] for value in values])[0][0]


def _is_own_kind(cls: type) -> bool:
    """Whether it is a class of this module, which stands for `keras.Variable`, and not made from a user's."""
    return cls.__module__ == __name__ and cls.__qualname__ in globals()


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def new_variable(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """Decides what `keras.Variable(...)` makes: the seam's hook for `__new__`.

    In a step, the replicas create in turn, and one that creates at the same
    place in its function as a replica before it takes that one's variable.
    """
    strategy = context.get_strategy()
    if strategy.num_local_replicas == 0 or issubclass(cls, DistributedVariable):
        return None  # the default strategy: Keras' own; or a kind that was asked for by name
    options = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    kind = strategy.variable_class(options)
    if cls is not keras_seam.Variable:
        kind = type(cls.__name__, (kind, cls), {})
    replica = context.creating_replica()
    if replica is None or replica.state is None:
        return object.__new__(kind)
    if replica.state.trace is not None:
        raise CannotCapture("it creates variables")
    if replica.num_active_replicas == 1:
        return object.__new__(kind)
    replica.wait_for_lower()
    key = creation_key()
    mine = replica.creations.setdefault(replica.replica_id_in_sync_group, {}).setdefault(key, [])
    for lower, created in sorted(replica.creations.items()):
        if lower < replica.replica_id_in_sync_group and len(created.get(key, ())) > len(mine):
            mine.append(created[key][len(mine)])
            return mine[-1]
    mine.append(object.__new__(kind))
    return mine[-1]


def check_synchronization(options: dict[str, Any]) -> str:
    """The synchronization of a variable about to be made in a scope.

    Raises:
        ValueError: for `"none"`, which has no meaning over several replicas.
    """
    synchronization = options.get("synchronization", "auto")
    if synchronization in ("none", None):
        raise ValueError(
            "`NONE` variable synchronization mode is not supported with tf.distribute strategy. "
            f"Received: synchronization={synchronization!r}, name={options.get('name')!r}. "
            'Please change the `synchronization` for the variable to "on_write", "on_read" or "auto".'
        )
    return "on_write" if synchronization == "auto" else synchronization

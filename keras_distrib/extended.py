"""`StrategyExtended`: what library code asks of a strategy, as `strategy.extended`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from keras_distrib import context, keras_seam, variables
from keras_distrib.comm import reduction
from keras_distrib.comm.cross_device_ops import check_destinations
from keras_distrib.options import ReduceOp
from keras_distrib.replicas.state import ReplicaState
from keras_distrib.values import Mirrored, PerReplica, components, map_structure, regroup, select

if TYPE_CHECKING:
    from keras_distrib.strategy import Strategy


class StrategyExtended:
    """A view on a strategy for code that works with single devices and components.

    Args:
        container_strategy: the strategy; `strategy.extended` gives its view.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.MirroredStrategy(["cpu:0"]).extended.worker_devices
    ('cpu:0',)
    """

    def __init__(self, container_strategy: Strategy) -> None:
        self._strategy = container_strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the devices that replicas compute on.

        Raises:
            RuntimeError: for the default strategy, which has none.
        """
        if not self._strategy.devices:
            raise RuntimeError(
                "worker_devices() method unsupported by default tf.distribute.Strategy. "
                f"Received: {self._strategy!r}. Create a strategy."
            )
        return tuple(str(device) for device in self._strategy.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold variables.

        Raises:
            RuntimeError: for the default strategy, which has none.
        """
        devices = self.worker_devices
        return (str(self._strategy.parameter_device),) if self._strategy.updates_once else devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether batches must all have one shape: never, here."""
        return False

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None) -> Any:
        """Reduces a per-replica value and puts the result on the destinations.

        Args:
            reduce_op: `ReduceOp.SUM` or `MEAN`, or their names.
            value: a per-replica value or distributed variable; the mean of any other
                value is the value itself.
            destinations: a device name, or a variable, per-replica value or tensor
                on whose devices the result is put.
            options: handed to the strategy's `CrossDeviceOps`.

        Returns:
            A tensor for one device, a `Mirrored` value for several.

        Raises:
            ValueError: for an unknown `reduce_op`, destinations that are none, or the
                sum of a value that is the same on all replicas.
            RuntimeError: in a replica's function.

        Example:

        >>> import torch, keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> value = strategy.experimental_distribute_values_from_function(lambda context: torch.tensor(2.0))
        >>> strategy.extended.reduce_to("SUM", value, "cpu:0")
        tensor(2.)
        """
        context.require_cross_replica(self._strategy)
        op = ReduceOp.from_name(reduce_op)
        check_destinations(destinations)
        if isinstance(value, Mirrored) or components(value) is None:
            return reduction.reduce_shared(op, value, self._strategy.num_local_replicas)
        return self._strategy.cross_device_ops.reduce(op, value, destinations, options)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """Reduces several per-replica values together.

        Args:
            reduce_op: `ReduceOp.SUM` or `MEAN`, or their names.
            value_destination_pairs: a list of `(value, destinations)`, as for
                `reduce_to`.
            options: handed to the strategy's `CrossDeviceOps`.

        Returns:
            A list of what `reduce_to` gives for each pair.

        Raises:
            ValueError: as for `reduce_to`, or for an entry that is no such pair.
            RuntimeError: in a replica's function.
        """
        context.require_cross_replica(self._strategy)
        return self._strategy.cross_device_ops.batch_reduce(reduce_op, value_destination_pairs, options)

    def update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        """Calls a function once for each component of a variable, to update it.

        Args:
            var: a variable made in this strategy's scope.
            fn: called as `fn(var, *args, **kwargs)` in cross-replica context; in it
                the variable reads and writes one component.
            args: positional arguments; per-replica values are split.
            kwargs: keyword arguments, likewise.
            group: whether to group the results.

        Returns:
            With `group` a `Mirrored` value where the calls returned different
            objects, else what all returned; without, a tuple with each call's
            result. A variable that replicas share has one component.

        Raises:
            ValueError: if the variable is of another scope.
            RuntimeError: under another strategy.

        Example:

        >>> import keras, keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     variable = keras.Variable(1.0)
        >>> strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(2.0,))
        tensor(3.)
        """
        replica = context.running_replica()
        if replica is not None:
            context.require_same_strategy(self._strategy)

            def merged(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
                return strategy.extended.update(var, fn, args, kwargs, group)

            return replica.merge_call(merged, args, kwargs)
        context.require_cross_replica(self._strategy)
        if not self.variable_created_in_scope(var):
            raise ValueError(
                f"`update` needs a variable that was created in the scope of {self._strategy!r}. "
                f"Received: var={var!r}. Create it inside `with strategy.scope():`."
            )
        results = self._update_each(var, fn, tuple(args), dict(kwargs or {}))
        if not group:
            return tuple(results)
        grouped = results[0] if len(results) == 1 else regroup(results, range(len(results)), len(results))
        return map_structure(lambda leaf: Mirrored(leaf.values) if isinstance(leaf, PerReplica) else leaf, grouped)

    def _update_each(
        self, var: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        count = len(components(var) or (var,))
        results = []
        with context.entered(context.Frame(self._strategy, None)):
            for index in range(count):
                own_args, own_kwargs = select(index, args), select(index, kwargs)
                with self._on_component(index) if count > 1 else contextlib.nullcontext():
                    results.append(_detached(fn(var, *own_args, **own_kwargs)))
        return results

    @contextlib.contextmanager
    def _on_component(self, index: int) -> Iterator[None]:
        """Where variables read and write the component of one replica."""
        strategy = self._strategy
        device = strategy.devices[index]
        count = strategy.num_local_replicas
        state = ReplicaState(strategy, index, strategy.replica_id(index), device, count, None, None)
        with keras_seam.device(str(device.torch_device)), state, state.updating():
            yield

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Puts variables created meanwhile on the devices of another one.

        All variables of a strategy on one machine are on the same devices, so this
        only checks its argument.

        Args:
            colocate_with_variable: a variable made in this strategy's scope.

        Raises:
            RuntimeError: outside of the strategy's scope.
            ValueError: for a variable of another scope, or none.
        """
        if context.get_strategy() is not self._strategy:
            raise RuntimeError(
                f'Need to be inside "with strategy.scope()" for {self._strategy!r}. '
                f"Received: the current strategy is {context.get_strategy()!r}."
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this tf.distribute.Strategy.scope(), "
                f"not: {colocate_with_variable!r}. Received: colocate_with_variable={colocate_with_variable!r}"
            )
        yield

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether a variable was created in this strategy's scope.

        Args:
            v: a variable.

        Returns:
            A bool; the default strategy created those of no scope.
        """
        if not isinstance(v, keras_seam.Variable):
            return False
        owner = getattr(v, "strategy", None)
        return owner is self._strategy or (owner is None and not self._strategy.devices)

    def value_container(self, value: Any) -> Any:
        """The distributed variable that holds a component.

        Args:
            value: one of the tensors that `experimental_local_results` gives for a
                variable, or any other value.

        Returns:
            The variable, or the value itself if it is no component of one.
        """
        return variables.container_of(value)


def _detached(structure: Any) -> Any:
    """Results that later updates do not change: copies of tensors that variables hold."""

    def detach(leaf: Any) -> Any:
        if isinstance(leaf, keras_seam.Variable):
            leaf = leaf.value
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    return map_structure(detach, structure)

"""`ReplicaContext`: what code in a replica's function can ask and do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from keras_distrib import context
from keras_distrib.comm import collectives
from keras_distrib.options import ReduceOp
from keras_distrib.values import regroup, select

if TYPE_CHECKING:
    from keras_distrib.replicas.meeting import Meeting
    from keras_distrib.replicas.random_streams import ReplicaSeeds
    from keras_distrib.replicas.runner import CallerState
    from keras_distrib.replicas.state import ReplicaState
    from keras_distrib.strategy import Strategy


class Run(NamedTuple):
    """The run that a replica's context belongs to."""

    meeting: Meeting
    caller: CallerState
    seeds: ReplicaSeeds


class ReplicaContext:
    """One replica's side of a `Strategy.run`.

    Get it with `keras_distrib.get_replica_context()` in a function that
    `Strategy.run` calls; it is None in cross-replica context.

    Args:
        strategy: the strategy that runs the replica.
        replica_id_in_sync_group: the replica's id.

    Attributes:
        strategy: the `Strategy`.
        replica_id_in_sync_group: this replica's id, from 0; a Python int.
        num_replicas_in_sync: how many replicas the strategy keeps in sync.
        rows: rows of this replica's part of the batch, None if the step's
            arguments hold no batch that the strategy split.
        global_rows: rows of the whole batch, None likewise.

    Example:

    >>> import keras_distrib
    >>> strategy = keras_distrib.OneDeviceStrategy("cpu:0")
    >>> strategy.run(lambda: keras_distrib.get_replica_context().replica_id_in_sync_group)
    0
    """

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int) -> None:
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self._state: ReplicaState | None = None
        self._run: Run | None = None

    def bind(self, state: ReplicaState, run: Run) -> None:
        """Ties the context to the run it belongs to."""
        self._state = state
        self._run = run

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        if self._state is not None and self._state.trace is not None:
            self._state.trace.uses_replica_id = True
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        return self._strategy.num_replicas_in_sync

    @property
    def rows(self) -> int | None:
        return None if self._state is None else self._state.rows

    @property
    def global_rows(self) -> int | None:
        return None if self._state is None else self._state.global_rows

    @property
    def num_active_replicas(self) -> int:
        """How many replicas run this step; those without rows do not."""
        return 1 if self._state is None else self._state.num_active

    @property
    def state(self) -> ReplicaState | None:
        """The replica's state in this run; None for the default strategy's."""
        return self._state

    @property
    def run_state(self) -> ReplicaState:
        """The replica's state in this run.

        Raises:
            RuntimeError: if the context belongs to no run.
        """
        if self._state is None:
            raise self._not_running()
        return self._state

    @property
    def run(self) -> Run:
        """The run that the context belongs to.

        Raises:
            RuntimeError: if it belongs to none.
        """
        if self._run is None:
            raise self._not_running()
        return self._run

    @property
    def seeds(self) -> ReplicaSeeds:
        """The replica's random streams in this run."""
        return self.run.seeds

    @property
    def devices(self) -> tuple[str, ...]:
        """The device this replica computes on, as a tuple of one name."""
        return () if self._state is None else (str(self._state.device),)

    def __repr__(self) -> str:
        return f"<ReplicaContext replica {self._replica_id} of {self.num_replicas_in_sync} in {self._strategy!r}>"

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Leaves the replicas for a moment and calls `merge_fn` once for all.

        Args:
            merge_fn: called as `merge_fn(strategy, *args, **kwargs)` in
                cross-replica context; where replicas passed different objects
                it receives a `PerReplica`.
            args: this replica's positional arguments.
            kwargs: this replica's keyword arguments.

        Returns:
            The result; of a per-replica result, this replica's component.

        Raises:
            RuntimeError: if this is not the calling thread's context, or the
                replicas make different calls.

        Example:

        >>> import keras_distrib
        >>> strategy = keras_distrib.OneDeviceStrategy("cpu:0")
        >>> def step():
        ...     context = keras_distrib.get_replica_context()
        ...     return context.merge_call(lambda strategy, x: x + 1, args=(2,))
        >>> strategy.run(step)
        3
        """
        kwargs = {} if kwargs is None else kwargs
        self._require_current()
        if self._state is None:  # the default strategy
            with context.entered(context.Frame(self._strategy, None)):
                return merge_fn(self._strategy, *args, **kwargs)

        def merge(values: list[Any]) -> list[Any]:
            merged_args, merged_kwargs = self._regroup(values)
            with self._cross_replica():
                result = merge_fn(self._strategy, *merged_args, **merged_kwargs)
            return [select(index, result) for index in self.participants]

        return self.meet(f"merge_call({getattr(merge_fn, '__name__', merge_fn)})", (tuple(args), dict(kwargs)), merge)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Reduces a value over all replicas; every replica gets the result.

        The result is differentiable: the gradient of a sum is the sum over
        replicas of the gradients, that of a mean their mean.

        Args:
            reduce_op: `ReduceOp.SUM` or `MEAN`, or their names.
            value: a tensor, number, or nested structure of them, of the same
                shapes on all replicas.
            options: accepted for compatibility.

        Returns:
            The structure of `value` with reduced tensors.

        Raises:
            ValueError: for an unknown `reduce_op` or unequal shapes.

        Example:

        >>> import torch, keras_distrib
        >>> strategy = keras_distrib.OneDeviceStrategy("cpu:0")
        >>> def step():
        ...     return keras_distrib.get_replica_context().all_reduce("sum", torch.tensor(2.0))
        >>> strategy.run(step)
        tensor(2.)
        """
        op = ReduceOp.from_name(reduce_op)
        self._require_current()
        return collectives.all_reduce(self, op, value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates a value over all replicas; every replica gets the result.

        Lengths along `axis` may differ. The result is differentiable.

        Args:
            value: a tensor or nested structure of tensors of rank 1 or more.
            axis: the axis to concatenate along, not negative.
            options: accepted for compatibility.

        Returns:
            The structure of `value` with concatenated tensors.

        Raises:
            ValueError: for a scalar, a negative or too large axis, or shapes
                that differ in another axis.

        Example:

        >>> import torch, keras_distrib
        >>> strategy = keras_distrib.OneDeviceStrategy("cpu:0")
        >>> def step():
        ...     return keras_distrib.get_replica_context().all_gather(torch.ones(2), axis=0)
        >>> strategy.run(step)
        tensor([1., 1.])
        """
        self._require_current()
        return collectives.all_gather(self, value, axis)

    def meet(
        self,
        name: str,
        value: Any,
        action: Callable[[list[Any]], Sequence[Any]],
        like: Callable[[Any], Any] | None = None,
        **kind: bool,
    ) -> Any:
        """Meets the other replicas of this run; see `Meeting.meet`.

        While the step is traced, `like` gives new tensors like those that the meeting
        will give for a value; without it the step cannot be captured. `kind` is what
        else a `Boundary` says of it: `once`, `early`.
        """
        trace = self.run_state.trace
        if trace is not None:
            return trace.add(name, value, action, like, **kind)
        return self.run.meeting.meet(self.run_state.index, name, value, action)

    def meet_across(
        self,
        name: str,
        value: Any,
        action: Callable[[list[Any]], Sequence[Any]],
        like: Callable[[Any], Any] | None = None,
        **kind: bool,
    ) -> Any:
        """Like `meet`; the action runs in cross-replica context."""

        def act(values: list[Any]) -> Sequence[Any]:
            with self._cross_replica():
                return action(values)

        return self.meet(name, value, act, like, **kind)

    def wait_for_lower(self) -> None:
        """Waits for its turn to create something that all replicas share."""
        self.run.meeting.wait_for_lower(self.run_state.index)

    @property
    def creations(self) -> dict[int, dict[Any, list[Any]]]:
        """What this run's replicas created, to be found by those that follow."""
        return self.run.caller.creations

    @contextlib.contextmanager
    def standing_in(self, state: ReplicaState) -> Iterator[None]:
        """Acts for a replica that has no rows, with that one's state."""
        own = self._state
        self._state = state
        try:
            with state:
                yield
        finally:
            self._state = own

    @property
    def participants(self) -> tuple[int, ...]:
        """Local indices of the replicas that run."""
        return self.run.meeting.participants

    def _cross_replica(self) -> Any:
        return self.run.caller.cross_replica(self._strategy)

    def _regroup(self, values: list[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> tuple[Any, Any]:
        count, active = self._strategy.num_local_replicas, self.participants
        rows = None
        if len(active) < count:
            rows = [1 if index in active else 0 for index in range(count)]

        positional = regroup([args for args, _ in values], active, count, rows)
        return positional, regroup([kwargs for _, kwargs in values], active, count, rows)

    def _require_current(self) -> None:
        current = context.current_frame()
        if current.replica is self:
            return
        context.require_same_strategy(self._strategy)
        if current.strategy is not self._strategy:
            raise RuntimeError(
                f"Mismatching tf.distribute.Strategy objects: this context belongs to {self._strategy!r}, "
                f"the current strategy is {current.strategy!r}. Get a new context inside the function that `run` calls."
            )
        if current.replica is None:
            raise self._not_running()
        raise RuntimeError(
            f"Mismatching ReplicaContext. Received: {self!r}, but the current one is {current.replica!r}. "
            "Use `get_replica_context()` on each replica instead of handing one around."
        )

    def _not_running(self) -> RuntimeError:
        return RuntimeError(
            "Need to be inside `call_for_each_replica()`: this context's replica is not running here. "
            f"Received: {self!r}. Get a new context inside the function that `run` calls."
        )

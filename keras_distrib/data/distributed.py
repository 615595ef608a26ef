"""Datasets whose batches are split over replicas.

A `DistributedDataset` wraps a source of global batches, or a function that makes
one of per-replica batches. Each `iter` of it starts a new pass, read ahead by a
thread, and gives a `DistributedIterator` of per-replica batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from keras_distrib import context
from keras_distrib.data.pipeline import Pipeline, shard_source
from keras_distrib.data.prefetch import Prefetcher
from keras_distrib.data.sources import Source, as_source
from keras_distrib.data.split import Copies, SplitBatch, counted, cut
from keras_distrib.errors import OutOfRangeError
from keras_distrib.options import InputContext, InputOptions, InputReplicationMode
from keras_distrib.specs import batch_spec
from keras_distrib.values import PerReplica, leaves, map_structure, pack_like, select

if TYPE_CHECKING:
    from keras_distrib.strategy import Strategy

State = dict[str, Any]


class _Pass:
    """One pass over a distributed dataset: per-replica batches, each with the state after it."""

    def __init__(self, steps: Iterator[tuple[SplitBatch, State]], depth: int) -> None:
        self._steps = Prefetcher(lambda: steps, depth) if depth else steps
        self._ahead: list[tuple[SplitBatch, State]] = []

    def take(self) -> tuple[SplitBatch, State]:
        return self._ahead.pop() if self._ahead else next(self._steps)

    def look(self) -> SplitBatch | None:
        """The next batch, which stays the next; None at the end."""
        if not self._ahead:
            taken = next(self._steps, None)
            if taken is None:
                return None
            self._ahead.append(taken)
        return self._ahead[0][0]

    def close(self) -> None:
        if isinstance(self._steps, Prefetcher):
            self._steps.close()


class DistributedDataset:
    """An iterable of per-replica batches.

    Get it from `Strategy.experimental_distribute_dataset` or
    `distribute_datasets_from_function`. `Model.fit`, `evaluate` and `predict` take
    it too.

    Example:

    >>> import torch, keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
    >>> dataset = strategy.experimental_distribute_dataset([torch.arange(3), torch.arange(2)])
    >>> [len(batch) for batch in dataset]
    [3, 2]
    """

    def __init__(self, strategy: Strategy, feed: Feed, depth: int) -> None:
        self._strategy = strategy
        self._feed = feed
        self._depth = depth
        self._kept: _Pass | None = None  # begun for its spec, or the only pass of a one-shot source
        self._element_spec: Any = None

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self)

    def __len__(self) -> int:
        if self._feed.num_steps is None:
            raise TypeError("This dataset's number of batches is not known.")
        return self._feed.num_steps

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replicas the batches are for."""
        return self._strategy

    @property
    def num_batches(self) -> int | None:
        """Steps of one pass; None if that is not known."""
        return self._feed.num_steps

    @property
    def element_spec(self) -> Any:
        """The specs of a batch: a `PerReplicaSpec` for each of its parts.

        The number of rows is None where a batch may have fewer than others. The first
        batch is read to know the rest, and kept for the iteration that follows.

        Returns:
            The structure of a batch; with one replica, of `TensorSpec`.

        Raises:
            ValueError: if the dataset has no batches.

        Example:

        >>> import torch, keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> strategy.experimental_distribute_dataset([torch.ones(4, 1)]).element_spec
        TensorSpec(shape=(None, 1), dtype='float32', name=None)
        """
        if self._element_spec is None:
            first = self.first()
            if first is None:
                raise ValueError("A dataset without batches has no element_spec. Received: a dataset at its end.")
            fixed = self._feed.fixed_rows
            replicas = self._strategy.num_replicas_in_sync
            num_rows = fixed // replicas if fixed is not None and fixed % replicas == 0 else None
            self._element_spec = batch_spec(self.shown(first), num_rows)
        return self._element_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Goes through the dataset with a state.

        Args:
            initial_state: the first state.
            reduce_func: from a state and a per-replica batch to the next state.

        Returns:
            The last state.

        Example:

        >>> import torch, keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> dataset = strategy.experimental_distribute_dataset([torch.tensor([1, 2]), torch.tensor([3])])
        >>> int(dataset.reduce(0, lambda total, batch: total + strategy.reduce("SUM", batch, axis=None).sum()))
        6
        """
        state = initial_state
        for batch in self:
            state = reduce_func(state, batch)
        return state

    def first(self) -> SplitBatch | None:
        """The first batch, which stays the first; None if there is none."""
        if self._kept is None:
            self._kept = self.begin()
        return self._kept.look()

    def begin(self, state: State | None = None) -> _Pass:
        """A new pass; of a one-shot source, the only one."""
        kept, keep = self._kept, self._feed.is_one_shot
        if kept is not None and state is None:
            self._kept = kept if keep else None
            return kept
        begun = _Pass(self._feed.steps(state), self._depth)
        if keep:
            self._kept = begun
        return begun

    @property
    def is_one_shot(self) -> bool:
        """Whether there is a single pass, which every iterator goes on with."""
        return self._feed.is_one_shot

    @property
    def is_endless(self) -> bool:
        """Whether a pass is known to have no end."""
        return self._feed.is_endless

    def shown(self, batch: SplitBatch) -> Any:
        """A batch as users see it: of a strategy with one replica in all, plain tensors."""
        return batch.parts if self._strategy.num_replicas_in_sync > 1 else select(0, batch.parts)


class Feed:
    """What a distributed dataset reads: the batches of its replicas, step by step.

    Attributes:
        num_steps: steps of a pass; None if that is not known.
        is_one_shot: whether there is a single pass.
        is_endless: whether a pass is known to have no end.
        fixed_rows: rows of every global batch, None if they may differ.
    """

    num_steps: int | None = None
    is_one_shot = False
    is_endless = False
    fixed_rows: int | None = None

    def steps(self, state: State | None) -> Iterator[tuple[SplitBatch, State]]:
        """A new pass from a state, or from the start."""
        raise NotImplementedError


class GlobalFeed(Feed):
    """Splits the global batches of a source."""

    def __init__(self, source: Source, strategy: Strategy, options: InputOptions) -> None:
        own = strategy.input_pipelines
        self._own = own
        self._source, self._policy = shard_source(source, options.auto_shard_policy, own)
        self._devices = strategy.devices
        self._fetches = options.experimental_fetch_to_device is not False
        self.num_steps = self._source.num_batches if self._policy.name == "DATA" else None
        self.is_one_shot = self._source.is_one_shot
        self.is_endless = self._source.is_endless
        self.fixed_rows = source.fixed_rows if own.workers == 1 else None

    def steps(self, state: State | None) -> Iterator[tuple[SplitBatch, State]]:
        pipeline = Pipeline(self._source, self._policy, self._own)
        if state is not None:
            pipeline.set_state(state)
        return self._split(pipeline)

    def _split(self, pipeline: Pipeline) -> Iterator[tuple[SplitBatch, State]]:
        for step in pipeline:
            copies = Copies() if self._fetches else None
            parts = cut(step.batch, step.rows, self._devices, copies.to_device if copies else _left_there)
            yield SplitBatch(parts, sum(piece.length for piece in step.rows), copies), step.state


class FunctionFeed(Feed):
    """Deals the per-replica batches of a dataset function's sources to the replicas.

    Args:
        sources: one whose batches go to the replicas in turn, or one for each
            replica.
        strategy: the strategy.
        options: how batches are copied.
    """

    def __init__(self, sources: list[Source], strategy: Strategy, options: InputOptions) -> None:
        self._sources = sources
        self._devices = strategy.devices
        self._fetches = options.experimental_fetch_to_device is not False
        self.is_one_shot = any(source.is_one_shot for source in sources)
        self.is_endless = any(source.is_endless for source in sources)
        lengths = [source.num_batches for source in sources]
        if None not in lengths:
            count = len(self._devices)
            longest = max(length for length in lengths if length is not None)
            self.num_steps = longest if len(sources) > 1 or count == 1 else -(-longest // count)

    def steps(self, state: State | None) -> Iterator[tuple[SplitBatch, State]]:
        iterators = [source.iterator() for source in self._sources]
        if state is not None:
            for iterator, own in zip(iterators, state["sources"], strict=True):
                iterator.set_state(own)
        return self._deal(iterators)

    def _deal(self, iterators: list[Any]) -> Iterator[tuple[SplitBatch, State]]:
        count = len(self._devices)
        while True:
            turns = iterators if len(iterators) == count else iterators * count
            batches = [next(iterator, None) for iterator in turns]
            present = [counted_or_scalars(batch) for batch in batches if batch is not None]
            if not present:
                return
            empty = map_structure(_no_rows, present[0][0])
            found = iter(present)
            dealt = [(empty, 0) if batch is None else next(found) for batch in batches]
            if any(rows for _, rows in dealt):
                yield self._grouped(dealt), {"sources": [iterator.get_state() for iterator in iterators]}

    def _grouped(self, dealt: list[tuple[Any, int]]) -> SplitBatch:
        rows = [count for _, count in dealt]
        copies = Copies() if self._fetches else None
        copy = copies.to_device if copies else _left_there
        placed = []
        for column in zip(*(list(leaves(batch)) for batch, _ in dealt), strict=True):
            pairs = zip(column, self._devices, strict=True)
            placed.append(PerReplica([copy(p, d) if isinstance(p, torch.Tensor) else p for p, d in pairs], rows))
        return SplitBatch(pack_like(dealt[0][0], placed), sum(rows), copies)


def counted_or_scalars(batch: Any) -> tuple[Any, int]:
    """A per-replica batch and its rows; scalars are one row."""
    try:
        return counted(batch)
    except ValueError:
        structure = map_structure(lambda leaf: torch.as_tensor(leaf) if _is_number(leaf) else leaf, batch)
        if all(getattr(leaf, "ndim", None) == 0 for leaf in leaves(structure)):
            return structure, 1
        raise


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float) or (hasattr(leaf, "dtype") and getattr(leaf, "ndim", None) == 0)


def _no_rows(leaf: Any) -> Any:
    return leaf[:0] if getattr(leaf, "ndim", 0) else torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _left_there(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Copies nothing: a step that uses the tensor takes it to its device."""
    del device
    return tensor


class DistributedIterator:
    """Gives per-replica batches, one a step.

    `next` raises `StopIteration` at the end, `get_next` `OutOfRangeError`.

    Example:

    >>> import torch, keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
    >>> iterator = iter(strategy.experimental_distribute_dataset([torch.arange(3)]))
    >>> iterator.get_next()
    tensor([0, 1, 2])
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._pass: _Pass | None = None
        self._state: State | None = None

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        if context.running_replica() is not None:
            raise ValueError(
                "next(iterator) should be called from outside of replica_fn. "
                "e.g. strategy.run(replica_fn, args=(next(iterator),))"
            )
        batch, self._state = self._current().take()
        return self._dataset.shown(batch)

    def get_next(self) -> Any:
        """The next per-replica batch.

        Raises:
            OutOfRangeError: at the end.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("End of sequence: the distributed iterator has no more batches.") from None

    def get_next_as_optional(self) -> Optional:
        """The next per-replica batch, or the news that there is none.

        Returns:
            An `Optional`: `has_value()` says whether `get_value()` gives a batch.

        Example:

        >>> import torch, keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> iterator = iter(strategy.experimental_distribute_dataset([torch.arange(3)]))
        >>> [iterator.get_next_as_optional().has_value() for _ in range(2)]
        [True, False]
        """
        try:
            return Optional(next(self), True)
        except StopIteration:
            return Optional(None, False)

    @property
    def element_spec(self) -> Any:
        """The specs of a batch; see `DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    def get_state(self) -> State:
        """How far the iteration is, to be saved with a checkpoint.

        A batch that was read ahead, and not taken, does not count.

        Returns:
            A dict: the number of batches that were taken, and the state of a source
            that has its own.

        Example:

        >>> import torch, keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> dataset = strategy.experimental_distribute_dataset([torch.tensor([1]), torch.tensor([2])])
        >>> iterator = iter(dataset)
        >>> first = next(iterator)
        >>> resumed = iter(dataset)
        >>> resumed.set_state(iterator.get_state())
        >>> next(resumed)
        tensor([2])
        """
        return {} if self._state is None else dict(self._state)

    def set_state(self, state: State) -> None:
        """Goes on where another iterator of the same dataset was.

        Sources with random access, grain and stateful DataLoaders go there at once; of
        others the batches before it are read and skipped.

        Args:
            state: what `get_state` returned.

        Raises:
            ValueError: if a one-shot source is further than the state; at the next
                batch, if the dataset has fewer batches.
        """
        if self._dataset.is_one_shot and self._state is not None and state != self._state:
            raise ValueError(
                f"An iterator of a one-shot source cannot go back. Received: state={state!r}, here={self._state!r}. "
                "Make the dataset from a function that yields batches, not from a generator."
            )
        if self._pass is not None and not self._dataset.is_one_shot:
            self._pass.close()
        self._pass = self._dataset.begin(state or None)
        self._state = dict(state) or None

    def _current(self) -> _Pass:
        if self._pass is None:
            self._pass = self._dataset.begin()
        return self._pass


class Optional:
    """A batch, or none."""

    def __init__(self, value: Any, present: bool) -> None:
        self._value = value
        self._present = present

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return self._present

    def get_value(self) -> Any:
        """The batch.

        Raises:
            OutOfRangeError: if there is none.
        """
        if not self._present:
            raise OutOfRangeError("End of sequence: this optional has no value. Call `has_value` first.")
        return self._value


def distribute(dataset: Any, strategy: Strategy, options: InputOptions | None) -> DistributedDataset:
    """`Strategy.experimental_distribute_dataset`."""
    options = _checked(options)
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is only supported in `distribute_datasets_from_function`. "
            "Received: options.experimental_replication_mode=PER_REPLICA"
        )
    depth = strategy.num_local_replicas if options.prefetch is None else options.prefetch
    return DistributedDataset(strategy, GlobalFeed(as_source(dataset, options), strategy, options), depth)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any], strategy: Strategy, options: InputOptions | None
) -> DistributedDataset:
    """`Strategy.distribute_datasets_from_function`."""
    options = _checked(options)
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if per_replica and strategy.num_local_replicas == 1:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is only supported in strategies with several replicas. "
            f"Received: options.experimental_replication_mode=PER_REPLICA, strategy={strategy!r}"
        )
    worker, workers, replicas = strategy.input_pipelines
    total = strategy.num_replicas_in_sync
    if per_replica:
        contexts = [InputContext(total, strategy.replica_id(index), total) for index in range(replicas)]
        depth = options.experimental_per_replica_buffer_size
    else:
        contexts = [InputContext(workers, worker, total)]
        depth = 0
    sources = [source_of(dataset_fn, each, options) for each in contexts]
    depth = depth if options.prefetch is None else options.prefetch
    return DistributedDataset(strategy, FunctionFeed(sources, strategy, options), depth)


def source_of(dataset_fn: Any, input_context: InputContext, options: InputOptions) -> Source:
    """Calls a dataset function.

    Raises:
        TypeError: if it cannot be called with one argument, or returns no dataset.
    """
    if not callable(dataset_fn):
        raise TypeError(f"`dataset_fn` must be callable. Received: dataset_fn={dataset_fn!r}")
    _check_takes_context(dataset_fn)
    made = dataset_fn(input_context)
    try:
        return as_source(made, options)
    except TypeError as error:
        raise TypeError(
            f"`dataset_fn` must return a dataset. Received: {dataset_fn!r} returned {made!r} (of type "
            f"{type(made).__name__}). Return an iterable of per-replica batches, or a function that yields them."
        ) from error


def _check_takes_context(dataset_fn: Callable[..., Any]) -> None:
    try:
        inspect.signature(dataset_fn).bind(None)
    except TypeError as error:
        raise TypeError(
            f"`dataset_fn` must take one argument, an `InputContext`: {error}. Received: dataset_fn={dataset_fn!r}"
        ) from None
    except ValueError:  # a built-in without a signature
        return


def _checked(options: Any) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"`options` must be a `keras_distrib.InputOptions`. Received: options={options!r}")
    return options or InputOptions()

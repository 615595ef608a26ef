"""Datasets whose batches are split over replicas.

A *source* is any iterable of global batches. A `DistributedDataset` wraps one;
each `iter` of it starts the source again and gives a `DistributedIterator`,
whose elements are per-replica batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras

from keras_distrib import context
from keras_distrib.data.split import split_batch
from keras_distrib.errors import OutOfRangeError
from keras_distrib.specs import batch_spec
from keras_distrib.values import select

if TYPE_CHECKING:
    from keras_distrib.strategy import Strategy


_END = object()


class DistributedDataset:
    """An iterable of per-replica batches.

    Get it from `Strategy.experimental_distribute_dataset`.

    Example:

    >>> import torch, keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
    >>> dataset = strategy.experimental_distribute_dataset([torch.arange(3), torch.arange(2)])
    >>> [len(batch) for batch in dataset]
    [3, 2]
    """

    def __init__(self, source: Any, strategy: Strategy) -> None:
        if not isinstance(source, keras.utils.PyDataset) and not hasattr(source, "__iter__"):
            raise TypeError(
                "`dataset` must be an iterable of batches, such as a torch DataLoader, a keras PyDataset or a list. "
                f"Received: dataset={source!r} (of type {type(source).__name__}). "
                "Wrap arrays in a DataLoader with the global batch size."
            )
        self._source = source
        self._strategy = strategy
        self._started: DistributedIterator | None = None
        self._element_spec: Any = None

    def __iter__(self) -> DistributedIterator:
        started, self._started = self._started, None
        return started or self._iterator()

    @property
    def element_spec(self) -> Any:
        """The specs of a batch: a `PerReplicaSpec` for each of its parts.

        The number of rows is None, since a last batch may have fewer. The first
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
            if self._started is None:
                self._started = self._iterator()
            self._element_spec = self._started.element_spec
        return self._element_spec

    def _iterator(self) -> DistributedIterator:
        return DistributedIterator(self._batches(), self._strategy)

    def __len__(self) -> int:
        length = self._source.num_batches if isinstance(self._source, keras.utils.PyDataset) else len(self._source)
        if length is None:
            raise TypeError("This dataset's number of batches is not known.")
        return length

    def _batches(self) -> Iterator[Any]:
        if not isinstance(self._source, keras.utils.PyDataset):
            return iter(self._source)
        return self._py_dataset_batches(self._source)

    @staticmethod
    def _py_dataset_batches(source: Any) -> Iterator[Any]:
        if source.num_batches is None:
            raise ValueError(
                "An endless PyDataset cannot be iterated to its end. Received: num_batches=None. "
                "Give it a length, or pass it to `Model.fit` with `steps_per_epoch`."
            )
        for index in range(source.num_batches):
            yield source[index]
        source.on_epoch_end()


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

    def __init__(self, batches: Iterator[Any], strategy: Strategy) -> None:
        self._batches = batches
        self._strategy = strategy
        self._ahead: list[Any] = []  # a batch that was read for its spec
        self._element_spec: Any = None
        self._taken = 0

    def __iter__(self) -> DistributedIterator:
        return self

    @property
    def element_spec(self) -> Any:
        """The specs of a batch; see `DistributedDataset.element_spec`."""
        if self._element_spec is None:
            if not self._ahead:
                self._ahead.append(next(self._batches, _END))
            if self._ahead[0] is _END:
                raise ValueError("A dataset without batches has no element_spec. Received: an iterator at its end.")
            self._element_spec = batch_spec(self._split(self._ahead[0]))
        return self._element_spec

    def get_state(self) -> dict[str, int]:
        """How far the iteration is, to be saved with a checkpoint.

        Returns:
            A dict with the number of batches that were taken.

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
        return {"batches": self._taken}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes on where another iterator of the same dataset was, by skipping batches.

        Args:
            state: what `get_state` returned.

        Raises:
            ValueError: if this iterator is further than the state, or the dataset
                has fewer batches.
        """
        target = int(state["batches"])
        if target < self._taken:
            raise ValueError(
                f"An iterator cannot go back. Received: state={state!r}, batches taken={self._taken}. "
                "Call `set_state` on a new iterator of the dataset."
            )
        while self._taken < target:
            try:
                self._next_batch()
            except StopIteration:
                raise ValueError(
                    f"The dataset has fewer batches than were taken. Received: state={state!r}, batches={self._taken}"
                ) from None

    def _next_batch(self) -> Any:
        batch = self._ahead.pop() if self._ahead else next(self._batches)
        if batch is _END:
            self._ahead.append(batch)
            raise StopIteration
        self._taken += 1
        return batch

    def __next__(self) -> Any:
        if context.running_replica() is not None:
            raise ValueError(
                "next(iterator) should be called from outside of replica_fn. "
                "e.g. strategy.run(replica_fn, args=(next(iterator),))"
            )
        return self._split(self._next_batch())

    def get_next(self) -> Any:
        """The next per-replica batch.

        Raises:
            OutOfRangeError: at the end.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("End of sequence: the distributed iterator has no more batches.") from None

    def _split(self, batch: Any) -> Any:
        """The per-replica batch; of a strategy with one replica in all, plain tensors."""
        split, _ = split_batch(batch, self._strategy.devices)
        return split if self._strategy.num_replicas_in_sync > 1 else select(0, split)

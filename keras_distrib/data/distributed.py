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

if TYPE_CHECKING:
    from keras_distrib.strategy import Strategy


class DistributedDataset:
    """An iterable of per-replica batches.

    Get it from `Strategy.experimental_distribute_dataset`.

    Example:

    >>> import torch, keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
    >>> dataset = strategy.experimental_distribute_dataset([torch.arange(3), torch.arange(2)])
    >>> [batch.rows for batch in dataset]
    [(3,), (2,)]
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

    def __iter__(self) -> DistributedIterator:
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
    >>> iterator.get_next().values
    (tensor([0, 1, 2]),)
    """

    def __init__(self, batches: Iterator[Any], strategy: Strategy) -> None:
        self._batches = batches
        self._strategy = strategy

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        if context.running_replica() is not None:
            raise ValueError(
                "next(iterator) should be called from outside of replica_fn. "
                "e.g. strategy.run(replica_fn, args=(next(iterator),))"
            )
        batch, _ = split_batch(next(self._batches), self._strategy.devices)
        return batch

    def get_next(self) -> Any:
        """The next per-replica batch.

        Raises:
            OutOfRangeError: at the end.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("End of sequence: the distributed iterator has no more batches.") from None

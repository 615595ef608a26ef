"""`NumpyDataset`: rows of arrays in memory, in an order of one's own.

A dataset is a stream of row numbers, or of batches of them; every method gives a
new view and copies no rows. Rows are read when a batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_distrib.data.sharding import Rows
from keras_distrib.data.sources import RandomAccessSource, Source, SourceIterator, as_rows
from keras_distrib.values import leaves, map_structure

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class _Stream:
    """A sequence of numbers that may be endless: `at` maps positions to them.

    Attributes:
        length: how many there are; None for endlessly many.
        at: from positions and the number of the pass to numbers.
    """

    def __init__(self, length: int | None, at: Callable[[Numbers, int], Numbers]) -> None:
        self.length = length
        self.at = at

    def shard(self, num_shards: int, index: int) -> _Stream:
        if not 0 <= index < num_shards:
            raise ValueError(
                "`index` must be at least 0 and less than `num_shards`. "
                f"Received: num_shards={num_shards}, index={index}"
            )
        length = None if self.length is None else max(0, -(-(self.length - index) // num_shards))
        return _Stream(length, lambda positions, turn: self.at(positions * num_shards + index, turn))

    def shuffle(self, seed: int | None, reshuffle_each_iteration: bool) -> _Stream:
        length = self.length
        if length is None:
            raise ValueError("An endless dataset cannot be shuffled. Call `shuffle` before `repeat`.")
        entropy = int(np.random.default_rng().integers(1 << 62)) if seed is None else seed
        orders: dict[int, Numbers] = {}

        def at(positions: Numbers, turn: int) -> Numbers:
            turn = turn if reshuffle_each_iteration else 0
            if turn not in orders:
                orders.clear()  # one pass at a time
                orders[turn] = np.random.default_rng([entropy, turn]).permutation(length)
            return self.at(orders[turn][positions], turn)

        return _Stream(length, at)

    def repeat(self, count: int | None) -> _Stream:
        length = self.length
        if length is None or not length:
            return self
        times = None if count is None or count < 0 else count

        def at(positions: Numbers, turn: int) -> Numbers:
            turns = positions // length
            found = np.empty_like(positions)
            for repetition in np.unique(turns):
                here = turns == repetition
                number = int(repetition) if times is None else turn * times + int(repetition)
                found[here] = self.at(positions[here] % length, number)
            return found

        return _Stream(None if times is None else length * times, at)


class NumpyDataset:
    """Rows of arrays, and after `batch` batches of them.

    Get it from `Strategy.make_experimental_numpy_dataset`. For more than this, such
    as maps and files, use grain.

    Example:

    >>> import numpy as np, keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
    >>> dataset = strategy.make_experimental_numpy_dataset((np.arange(6), np.arange(6) * 10))
    >>> [x.tolist() for x, y in dataset.shard(2, 1).repeat(2).batch(2)]
    [[1, 3], [5, 1], [3, 5]]
    """

    def __init__(self, arrays: Any, rows: _Stream, batches: _Stream | None = None, batch_size: int = 0) -> None:
        self._arrays = arrays
        self._rows = rows
        self._batches = batches
        self._batch_size = batch_size
        self._drops = False
        self._passes = 0

    @classmethod
    def of(cls, arrays: Any) -> NumpyDataset:
        """A dataset of all rows of a nested structure of arrays.

        Raises:
            ValueError: if the arrays differ in rows, or there are none.
        """
        arrays = as_rows(arrays)
        found = [leaf for leaf in leaves(arrays) if leaf is not None]
        if not found:
            raise ValueError(f"A dataset needs at least one array. Received: numpy_input={arrays!r}")
        return cls(arrays, _Stream(int(found[0].shape[0]), lambda positions, _: positions))

    def _view(self, change: Callable[[_Stream], _Stream]) -> NumpyDataset:
        if self._batches is None:
            return NumpyDataset(self._arrays, change(self._rows))
        view = NumpyDataset(self._arrays, self._rows, change(self._batches), self._batch_size)
        view._drops = self._drops
        return view

    def shard(self, num_shards: int, index: int) -> NumpyDataset:
        """Every `num_shards`-th row (or batch), from number `index`.

        Raises:
            ValueError: for an index out of range.
        """
        return self._view(lambda stream: stream.shard(num_shards, index))

    def shuffle(self, seed: int | None = None, reshuffle_each_iteration: bool = True) -> NumpyDataset:
        """All rows (or batches) in a random order, another one in each pass.

        Args:
            seed: repeats the orders; None draws new ones.
            reshuffle_each_iteration: whether each pass has another order.

        Raises:
            ValueError: for an endless dataset.
        """
        return self._view(lambda stream: stream.shuffle(seed, reshuffle_each_iteration))

    def repeat(self, count: int | None = None) -> NumpyDataset:
        """The rows (or batches) `count` times over, or without end."""
        return self._view(lambda stream: stream.repeat(count))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> NumpyDataset:
        """Batches of rows that follow one another.

        Args:
            batch_size: rows of a batch: the global batch size.
            drop_remainder: whether to leave out a last batch of fewer rows.

        Raises:
            ValueError: if it is batched already, or `batch_size` is less than 1.
        """
        if self._batches is not None or batch_size < 1:
            raise ValueError(
                "A dataset is batched once, by at least 1 row. "
                f"Received: batch_size={batch_size}, batched by={self._batch_size or None}"
            )
        length = self._rows.length
        count = None if length is None else length // batch_size if drop_remainder else -(-length // batch_size)
        made = NumpyDataset(self._arrays, self._rows, _Stream(count, lambda positions, _: positions), batch_size)
        made._drops = drop_remainder
        return made

    def __len__(self) -> int:
        stream = self._batches or self._rows
        if stream.length is None:
            raise TypeError("An endless dataset has no length.")
        return stream.length

    def __iter__(self) -> Iterator[Any]:
        if self._batches is not None:
            return iter(self.as_source())
        turn = self._begin_pass()
        count = self._rows.length
        return (self.take(self._rows.at(np.array([i]), turn), one=True) for i in _numbers(count))

    def as_source(self) -> Source:
        """The source of batches.

        Raises:
            ValueError: if it is not batched.
        """
        if self._batches is None:
            raise ValueError(
                "A dataset of rows must be batched before it is distributed. Received: a NumpyDataset without "
                "`batch`. Call the `batch` method with the global batch size."
            )
        source = _EndlessSource(self) if self._batches.length is None else _FiniteSource(self, self._batches.length)
        source.fixed_rows = self._batch_size if self._drops or self._rows.length is None else None
        return source

    def take(self, numbers: Numbers, one: bool = False) -> Any:
        """Some rows, a view of the arrays where they follow one another."""
        if one:
            return map_structure(lambda array: None if array is None else array[int(numbers[0])], self._arrays)
        follow = len(numbers) and bool((np.diff(numbers) == 1).all())
        chosen: Any = slice(int(numbers[0]), int(numbers[-1]) + 1) if follow else numbers
        return map_structure(lambda array: None if array is None else array[chosen], self._arrays)

    def rows_of(self, index: int, turn: int, part: Rows | None = None) -> Numbers:
        """The row numbers of batch `index` in a pass, or a part of them."""
        assert self._batches is not None  # noqa: S101
        batch = int(self._batches.at(np.array([index]), turn)[0])
        start, stop = batch * self._batch_size, (batch + 1) * self._batch_size
        if self._rows.length is not None:
            stop = min(stop, self._rows.length)
        if part is not None:
            start, stop = start + part.start, start + part.stop
        return self._rows.at(np.arange(start, stop), turn)

    def _begin_pass(self) -> int:
        self._passes += 1
        return self._passes - 1


def _numbers(count: int | None) -> Iterator[int]:
    number = 0
    while count is None or number < count:
        yield number
        number += 1


class _NumpyIterator(SourceIterator):
    """A pass that knows its number, on which the order of the rows depends."""

    def __init__(self, dataset: NumpyDataset, count: int | None) -> None:
        self._dataset = dataset
        self._count = count
        self._turn = dataset._begin_pass()
        super().__init__(self._from(0))

    def _from(self, first: int) -> Iterator[Any]:
        for index in _numbers(self._count):
            if index >= first:
                yield self._dataset.take(self._dataset.rows_of(index, self._turn))

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"pass": self._turn}

    def set_state(self, state: dict[str, Any]) -> None:
        self._turn = int(state.get("pass", self._turn))
        self._dataset._passes = self._turn + 1
        self._taken = int(state["batches"])
        self._batches = self._from(self._taken)


class _FiniteSource(RandomAccessSource):
    def __init__(self, dataset: NumpyDataset, count: int) -> None:
        self._dataset = dataset
        self.num_batches = count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterator())

    def iterator(self) -> SourceIterator:
        return _NumpyIterator(self._dataset, self.num_batches)

    def num_rows(self, index: int) -> int:
        return len(self._dataset.rows_of(index, max(0, self._dataset._passes - 1)))

    def batch_rows(self, index: int, rows: Rows) -> Any:
        return self._dataset.take(self._dataset.rows_of(index, max(0, self._dataset._passes - 1), rows))


class _EndlessSource(Source):
    is_endless = True

    def __init__(self, dataset: NumpyDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterator())

    def iterator(self) -> SourceIterator:
        return _NumpyIterator(self._dataset, None)

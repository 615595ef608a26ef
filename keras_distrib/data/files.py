"""Sources made of files, which FILE sharding divides over workers."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keras_distrib.data.sharding import Rows, shard_files
from keras_distrib.data.sources import Source, as_rows, slice_rows
from keras_distrib.values import leaves, map_structure, pack_like

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def from_files(
    patterns: str | Path | Sequence[str | Path],
    reader: Callable[[str], Iterable[Any]],
    batch_size: int | None = None,
    *,
    drop_remainder: bool = False,
    seed: int | None = None,
    cycle_length: int = 1,
) -> FileSource:
    """A dataset read from files, batch by batch, never more than a few chunks in memory.

    The files come in sorted order, or with a seed in a shuffled one, which is the same
    on every worker. With `AutoShardPolicy.FILE` each worker reads every n-th of them;
    a batch at the end of a worker's files may then have fewer rows than others.

    Args:
        patterns: paths or patterns such as `"data/*.npz"` or
            `"shard-{000..199}.tar"`, or a list of them.
        reader: from a path to an iterable of chunks: nested structures of arrays with
            the rows in axis 0, of any number of rows.
        batch_size: rows of a global batch, put together over chunks and files; None
            takes chunks for batches.
        drop_remainder: whether to leave out a last batch of fewer rows.
        seed: shuffles the files, in another order in each pass.
        cycle_length: how many files are read in turn, a chunk of each.

    Returns:
        A source for `experimental_distribute_dataset`, `Model.fit` and the others.

    Raises:
        FileNotFoundError: if a pattern matches nothing.
        ValueError: for a `batch_size` or `cycle_length` less than 1.

    Example:

    ```python
    def read(path):
        data = np.load(path)
        yield data["x"], data["y"]


    dataset = keras_distrib.data.from_files("digits/*.npz", read, batch_size=64)
    model.fit(dataset, epochs=3)
    ```
    """
    for name, value in (("batch_size", batch_size), ("cycle_length", cycle_length)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1. Received: {name}={value}")
    return FileSource(_expand(patterns), reader, batch_size, drop_remainder, seed, cycle_length)


class FileSource(Source):
    """Batches of rows from files; make one with `from_files`.

    Attributes:
        files: the paths, in the order of the first pass without shuffling.
    """

    def __init__(
        self,
        files: Sequence[str],
        reader: Callable[[str], Iterable[Any]],
        batch_size: int | None,
        drop_remainder: bool,
        seed: int | None,
        cycle_length: int,
    ) -> None:
        self.files = tuple(files)
        self._reader = reader
        self._batch_size = batch_size
        self._drops = drop_remainder
        self._seed = seed
        self._cycle_length = cycle_length
        self._shard = (0, 1)
        self._passes = 0
        self.fixed_rows = batch_size if drop_remainder else None

    def for_worker(self, worker: int, workers: int) -> Source:
        shard_files(self.files, worker, workers)  # raises if there are too few
        own = FileSource(self.files, self._reader, self._batch_size, self._drops, self._seed, self._cycle_length)
        own._shard = (worker, workers)
        return own

    def __iter__(self) -> Iterator[Any]:
        files = list(self.files)
        if self._seed is not None:
            np.random.default_rng([self._seed, self._passes]).shuffle(files)
        self._passes += 1
        chunks = self._interleaved(shard_files(files, *self._shard))
        return chunks if self._batch_size is None else self._rebatched(chunks)

    def _interleaved(self, files: Sequence[str]) -> Iterator[Any]:
        waiting = iter(files)
        open_files: list[Iterator[Any]] = []
        while True:
            while len(open_files) < self._cycle_length and (path := next(waiting, None)) is not None:
                open_files.append(iter(self._reader(path)))
            if not open_files:
                return
            for chunks in list(open_files):
                chunk = next(chunks, _END)
                if chunk is _END:
                    open_files.remove(chunks)
                else:
                    yield as_rows(chunk)

    def _rebatched(self, chunks: Iterator[Any]) -> Iterator[Any]:
        size = self._batch_size or 0
        held: list[Any] = []
        rows = 0
        for chunk in chunks:
            count = _count(chunk)
            start = 0
            while rows + count - start >= size:
                stop = start + size - rows
                held.append(slice_rows(chunk, Rows(start, stop)))
                yield _joined(held)
                held, rows, start = [], 0, stop
            if start < count:
                held.append(slice_rows(chunk, Rows(start, count)))
                rows += count - start
        if held and not self._drops:
            yield _joined(held)


_END = object()


def _count(chunk: Any) -> int:
    return next((int(leaf.shape[0]) for leaf in leaves(chunk) if leaf is not None), 0)


def _joined(held: list[Any]) -> Any:
    if len(held) == 1:
        return held[0]
    columns = zip(*(list(leaves(chunk)) for chunk in held), strict=True)
    return pack_like(map_structure(lambda leaf: leaf, held[0]), [_concatenated(column) for column in columns])


def _concatenated(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    return torch.cat(list(parts)) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


def _expand(patterns: Any) -> list[str]:
    """The files that patterns name, each pattern's sorted."""
    given = [patterns] if isinstance(patterns, str | Path) else list(patterns)
    files: list[str] = []
    for pattern in given:
        found = [match for name in _ranges(str(pattern)) for match in sorted(glob.glob(name))]
        if not found:
            raise FileNotFoundError(
                f"No file matches a pattern. Received: patterns={patterns!r}, without a match={pattern!r}"
            )
        files += found
    return files


def _ranges(pattern: str) -> list[str]:
    """`a{00..02}` stands for a00, a01 and a02."""
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    names = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [
        expanded for name in names for expanded in _ranges(pattern[: match.start()] + name + pattern[match.end() :])
    ]

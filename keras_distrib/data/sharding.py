"""Which rows a worker and a replica get: pure functions of counts.

A global batch of `rows` rows is cut into as many *pieces* as there are replicas
in all. With policy DATA each replica takes its piece of every batch, so a batch
is one step. With FILE and OFF a worker reads batches of its own (of its files, or
all of them) and deals their pieces to its replicas, which takes several steps.

Source of the rule: tf.distribute's rebatching of in-memory data, measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")


class Rows(NamedTuple):
    """Rows `start` to `stop - 1` of a global batch."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def split_rows(rows: int, replicas: int) -> list[int]:
    """How many rows each replica gets: ceil(rows / replicas), the rest, then none.

    Formula: as tf.distribute splits an in-memory batch.

    Args:
        rows: rows of the global batch.
        replicas: how many replicas there are.

    Returns:
        A list of `replicas` counts that add up to `rows`.

    Example:

    >>> from keras_distrib.data.sharding import split_rows
    >>> split_rows(7, 3), split_rows(4, 5)
    ([3, 3, 1], [1, 1, 1, 1, 0])
    """
    piece = -(-rows // replicas)
    return [max(0, min(piece, rows - piece * index)) for index in range(replicas)]


def pieces(rows: int, replicas: int) -> list[Rows]:
    """The replicas' pieces of a global batch, in replica order.

    Example:

    >>> from keras_distrib.data.sharding import pieces
    >>> [tuple(piece) for piece in pieces(4, 3)]
    [(0, 2), (2, 4), (4, 4)]
    """
    found, start = [], 0
    for count in split_rows(rows, replicas):
        found.append(Rows(start, start + count))
        start += count
    return found


def worker_rows(rows: int, worker: int, workers: int, replicas_per_worker: int) -> Rows:
    """With policy DATA: the rows of a global batch that one worker reads.

    Example:

    >>> from keras_distrib.data.sharding import worker_rows
    >>> [tuple(worker_rows(5, worker, 2, 1)) for worker in range(2)]
    [(0, 3), (3, 5)]
    """
    own = pieces(rows, workers * replicas_per_worker)[worker * replicas_per_worker :][:replicas_per_worker]
    return Rows(own[0].start, own[-1].stop)


def worker_steps(rows: int, workers: int, replicas_per_worker: int) -> list[list[Rows]]:
    """With policies FILE and OFF: the steps that one batch of a worker's own gives.

    Args:
        rows: rows of the batch.
        workers: how many workers there are.
        replicas_per_worker: replicas of this worker.

    Returns:
        For each step the pieces of this worker's replicas; steps without rows are
        left out.

    Example:

    >>> from keras_distrib.data.sharding import worker_steps
    >>> [[tuple(piece) for piece in step] for step in worker_steps(4, 2, 1)]
    [[(0, 2)], [(2, 4)]]
    """
    found = pieces(rows, workers * replicas_per_worker)
    steps = [found[start : start + replicas_per_worker] for start in range(0, len(found), replicas_per_worker)]
    return [step for step in steps if any(piece.length for piece in step)]


def shard_files(files: Sequence[Item], worker: int, workers: int) -> list[Item]:
    """With policy FILE: the files of one worker, every `workers`-th.

    Args:
        files: all files, in the order that is the same on every worker.
        worker: the worker's number.
        workers: how many workers there are.

    Raises:
        ValueError: if there are fewer files than workers.

    Example:

    >>> from keras_distrib.data.sharding import shard_files
    >>> shard_files(["a", "b", "c"], worker=0, workers=2)
    ['a', 'c']
    """
    if len(files) < workers:
        raise ValueError(
            f"Could not apply FILE based sharding: there are fewer files than workers. Received: {len(files)} files, "
            f"{workers} workers. Use AutoShardPolicy.DATA, or write more files."
        )
    return list(files[worker::workers])

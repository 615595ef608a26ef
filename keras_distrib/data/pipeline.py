"""From a source to the batches of one worker's replicas, step by step.

A *pipeline* belongs to one worker. It reads global batches, or this worker's part
of them, and gives for each step the batch and the rows of each local replica.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from keras_distrib.data.sharding import Rows, pieces, worker_rows, worker_steps
from keras_distrib.data.sources import Source, SourceIterator
from keras_distrib.data.split import counted
from keras_distrib.options import AutoShardPolicy

logger = logging.getLogger("keras_distrib")


class Pipelines(NamedTuple):
    """Which of a cluster's input pipelines one is, and what they feed.

    Attributes:
        worker: number of this worker.
        workers: how many there are.
        replicas: replicas of this worker.
    """

    worker: int = 0
    workers: int = 1
    replicas: int = 1


class Step(NamedTuple):
    """What one step reads: a batch, and for each local replica its rows of it.

    Attributes:
        batch: a counted batch.
        rows: for each local replica its rows.
        global_rows: rows of the step over all workers; None if this one cannot know.
        state: the pipeline's state after this step.
    """

    batch: Any
    rows: list[Rows]
    global_rows: int | None
    state: dict[str, Any]


def shard_source(source: Source, policy: AutoShardPolicy, own: Pipelines) -> tuple[Source, AutoShardPolicy]:
    """The source that one worker reads, and the policy that is left: DATA or OFF.

    With FILE a worker reads batches of its own files, all of them.

    Raises:
        ValueError: for FILE, if there are no files or fewer than workers.
    """
    if own.workers == 1:
        return source, AutoShardPolicy.DATA
    if policy is AutoShardPolicy.AUTO and source.auto_shard_policy is not None:
        policy = source.auto_shard_policy
    if policy in (AutoShardPolicy.OFF, AutoShardPolicy.DATA):
        return source, policy
    try:
        files = source.for_worker(own.worker, own.workers)
        if files is None and policy is not AutoShardPolicy.AUTO:
            raise ValueError(
                f"Could not apply {policy.name} based sharding: the source is not made of files. "
                f"Received: source of type {type(source).__name__}. Use AutoShardPolicy.DATA, or `data.from_files`."
            )
    except ValueError as error:
        if policy is not AutoShardPolicy.AUTO:
            raise
        logger.warning("AutoShardPolicy.AUTO takes DATA instead of FILE: %s", error)
        files = None
    return (source, AutoShardPolicy.DATA) if files is None else (files, AutoShardPolicy.OFF)


class Pipeline:
    """One pass over a worker's part of a source.

    Args:
        source: what this worker reads; see `shard_source`.
        policy: `DATA`, or `OFF` for every row of the source.
        own: which pipeline this is.
    """

    def __init__(self, source: Source, policy: AutoShardPolicy, own: Pipelines) -> None:
        self._source = source
        self._own = own
        self._reads_rows = source.has_random_access and own.workers > 1 and policy is AutoShardPolicy.DATA
        self._policy = policy
        self._iterator: SourceIterator | None = None
        self._skip_steps = 0
        self._first = 0

    def set_state(self, state: dict[str, Any]) -> None:
        """Begins where another pass was; before the first step."""
        self._skip_steps = int(state.get("step", 0))
        if self._reads_rows:
            self._first = int(state["batches"])
            return
        self._iterator = self._source.iterator()
        self._iterator.set_state({name: value for name, value in state.items() if name != "step"})

    def __iter__(self) -> Iterator[Step]:
        return self._rows_of_batches() if self._reads_rows else self._whole_batches()

    def _rows_of_batches(self) -> Iterator[Step]:
        """Reads only this worker's rows of each batch."""
        own = self._own
        for index in range(self._first, self._source.num_batches or 0):
            total = self._source.num_rows(index)
            read = worker_rows(total, own.worker, own.workers, own.replicas)
            batch, _ = counted(self._source.batch_rows(index, read))
            yield Step(batch, self._pieces(total, read.start), total, {"batches": index + 1})

    def _whole_batches(self) -> Iterator[Step]:
        iterator, self._iterator = self._iterator or self._source.iterator(), None
        state = iterator.get_state()
        for batch in iterator:
            batch, total = counted(batch)
            after = iterator.get_state()
            steps = self._steps(total)
            for number, rows in enumerate(steps):
                if self._skip_steps:
                    self._skip_steps -= 1
                    continue
                last = number == len(steps) - 1
                known = total if self._policy is AutoShardPolicy.DATA else None
                yield Step(batch, rows, known, after if last else {**state, "step": number + 1})
            state = after

    def _steps(self, total: int) -> list[list[Rows]]:
        if not total:
            return []
        if self._policy is AutoShardPolicy.OFF and self._own.workers > 1:
            return worker_steps(total, self._own.workers, self._own.replicas)
        return [self._pieces(total, 0)]

    def _pieces(self, total: int, offset: int) -> list[Rows]:
        """This worker's pieces of a batch, counted from `offset`."""
        own = self._own
        first = own.worker * own.replicas
        found = pieces(total, own.workers * own.replicas)[first : first + own.replicas]
        return [Rows(piece.start - offset, piece.stop - offset) for piece in found]

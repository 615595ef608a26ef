"""Persistent threads, one per local replica."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

Job = Callable[[], None]


def _serve(inbox: queue.SimpleQueue[Job | None]) -> None:
    while (job := inbox.get()) is not None:
        job()
        del job  # a finished job must not keep its strategy alive


class ReplicaPool:
    """One thread per replica; `submit` gives a thread its next job.

    A job handles its own exceptions. `close`, also called when the pool is
    garbage collected, ends the threads.
    """

    def __init__(self, size: int, name: str) -> None:
        self._inboxes: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in range(size)]
        threads = []
        for index, inbox in enumerate(self._inboxes):
            thread = threading.Thread(
                target=_serve, args=(inbox,), name=f"keras_distrib {name} replica {index}", daemon=True
            )
            thread.start()
            threads.append(thread)
        self.close = weakref.finalize(self, _close, self._inboxes, threads)

    def submit(self, index: int, job: Job) -> None:
        self._inboxes[index].put(job)


def _close(inboxes: list[queue.SimpleQueue[Job | None]], threads: list[threading.Thread]) -> None:
    for inbox in inboxes:
        inbox.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=10)


class PoolShelf:
    """The pools of one strategy: one for each run that is under way at a time.

    A `run` within a `merge_call`, or from another thread, finds the first pool
    busy and gets another one.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._lock = threading.Lock()
        self._free: list[ReplicaPool] = []

    def take(self) -> ReplicaPool:
        with self._lock:
            if self._free:
                return self._free.pop()
        return ReplicaPool(self._size, self._name)

    def give_back(self, pool: ReplicaPool) -> None:
        with self._lock:
            self._free.append(pool)

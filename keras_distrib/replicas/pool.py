"""Persistent threads, one per local replica."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

Job = Callable[[], None]
JOIN_TIMEOUT_S = 5.0


def _serve(inbox: queue.SimpleQueue[Job | None]) -> None:
    while (job := inbox.get()) is not None:
        job()
        del job  # a finished job must not keep its strategy alive


class ReplicaPool:
    """One thread per replica; `submit` gives a thread its next job.

    A job handles its own exceptions. The threads end when the pool is garbage
    collected.
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
        self._finalizer = weakref.finalize(self, _close, self._inboxes, threads)

    def submit(self, index: int, job: Job) -> None:
        self._inboxes[index].put(job)

    def abandon(self) -> None:
        """Lets each thread end after its job, however long that takes."""
        self._finalizer.detach()
        for inbox in self._inboxes:
            inbox.put(None)


def _close(inboxes: list[queue.SimpleQueue[Job | None]], threads: list[threading.Thread]) -> None:
    for inbox in inboxes:
        inbox.put(None)
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


class PoolShelf:
    """The pools of one strategy: one for each run that is under way at a time.

    A `run` within a `merge_call`, or from another thread, finds the first pool
    busy and gets another one. A forked process has none of its parent's threads,
    and makes its own.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._free: list[ReplicaPool] = []

    def take(self) -> ReplicaPool:
        if self._process != os.getpid():
            self._lock, self._process, self._free = threading.Lock(), os.getpid(), []
        with self._lock:
            if self._free:
                return self._free.pop()
        return ReplicaPool(self._size, self._name)

    def give_back(self, pool: ReplicaPool) -> None:
        with self._lock:
            self._free.append(pool)

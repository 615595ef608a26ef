"""Reading ahead: the next batches are made in a thread while a step runs.

A `Prefetcher` is an iterator that another iterator fills from a thread of its
own. An error of the source is kept until the batch that it stands for is asked
for. The thread ends with the data, at an error, and when the prefetcher is closed
or no longer used.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from keras_distrib import keras_seam

CHECK_INTERVAL_S = 0.2
JOIN_TIMEOUT_S = 5.0
THREAD_NAME = "keras_distrib prefetch"


class _Item(NamedTuple):
    """One element, or what the source ended with."""

    value: Any
    error: BaseException | None = None


_END = _Item(None, StopIteration())


class _Shared:
    """What the thread and the prefetcher share; the thread must not keep the prefetcher alive."""

    def __init__(self, depth: int) -> None:
        self.items: queue.Queue[_Item] = queue.Queue(depth)
        self.stopped = threading.Event()

    def put(self, item: _Item) -> bool:
        """Waits for room; False if nobody takes items any more."""
        while not self.stopped.is_set():
            try:
                self.items.put(item, timeout=CHECK_INTERVAL_S)
            except queue.Full:
                continue
            return True
        return False


class Prefetcher:
    """Takes elements from an iterator ahead of their use.

    The iterator runs with the contexts and the Keras settings of the thread that
    made the prefetcher, so that a source draws from the same random generators.

    Args:
        source: a function that gives the iterator; it is called in the thread.
        depth: how many elements wait at most.
    """

    def __init__(self, source: Callable[[], Iterator[Any]], depth: int) -> None:
        self._shared = _Shared(depth)
        self._ended: BaseException | None = None
        run = contextvars.copy_context().run
        settings = keras_seam.thread_state()
        seeds = keras_seam.existing_seed_generator()
        self._thread = threading.Thread(
            target=run,
            args=(_fill, self._shared, source, settings, seeds),
            name=THREAD_NAME,
            daemon=True,
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._shared)

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        if self._ended is None:
            item = self._take()
            if item.error is None:
                return item.value
            self._ended = StopIteration() if isinstance(item.error, StopIteration) else item.error
            self._thread.join(JOIN_TIMEOUT_S)
            if not isinstance(item.error, StopIteration):
                raise item.error
        raise StopIteration  # an error is raised once; after it there is no more data

    def close(self) -> None:
        """Ends the thread, after the element that it is making."""
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _take(self) -> _Item:
        while True:
            try:
                return self._shared.items.get(timeout=CHECK_INTERVAL_S)
            except queue.Empty:
                if not self._thread.is_alive() and self._shared.items.empty():
                    # Such as in a forked process, which has none of its parent's threads.
                    raise RuntimeError(
                        "The thread that reads ahead has ended without its data. Iterate the dataset in the process "
                        "that made the iterator, or make a new iterator."
                    ) from None


def _fill(shared: _Shared, source: Callable[[], Iterator[Any]], settings: dict[str, Any], seeds: Any) -> None:
    item = _END
    try:
        with keras_seam.entered_thread_state(settings, seeds=seeds):
            iterator = source()
            del source
            while not shared.stopped.is_set():
                value = next(iterator, _END)
                if value is _END or not shared.put(_Item(value)):
                    break
                del value
    except BaseException as error:  # noqa: BLE001 - handed to the thread that asks for the batch
        item = _Item(None, error)
    shared.put(item)


def _stop(shared: _Shared) -> None:
    shared.stopped.set()
    try:  # a thread that waits for room finds some, and ends
        shared.items.get_nowait()
    except queue.Empty:
        return

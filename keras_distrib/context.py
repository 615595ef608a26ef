"""Which strategy, and which replica of it, the calling thread is in.

Exactly one of two contexts holds at any time. In *cross-replica context* (a
`scope()`, a `merge_call` function) code speaks of all replicas at once; in
*replica context* (a function that `run` calls, and the default strategy) it is
one of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from keras_distrib.replicas.replica_context import ReplicaContext
    from keras_distrib.strategy import Strategy

REQUIRES_CROSS_REPLICA = "Method requires being in cross-replica context, use get_replica_context().merge_call()"


class Frame(NamedTuple):
    """A strategy and, in replica context, the replica.

    `builder` is the replica whose step builds a layer for all of them meanwhile.
    """

    strategy: Strategy
    replica: ReplicaContext | None
    builder: ReplicaContext | None = None


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.set_globally: Frame | None = None


_state = _ThreadState()
_default: list[Frame] = []


def register_default(frame: Frame) -> None:
    """Tells this module what holds where no strategy was entered."""
    _default[:] = [frame]


def current_frame() -> Frame:
    if _state.frames:
        return _state.frames[-1]
    return _state.set_globally or _default[0]


def running_replica() -> ReplicaContext | None:
    """The replica whose step this thread runs, or None; never the default one's."""
    if _state.frames:
        return _state.frames[-1].replica
    return None


def creating_replica() -> ReplicaContext | None:
    """The replica whose step creates something that its others create too, if any.

    None in a `merge_call`, where one thread creates for all.
    """
    if not _state.frames:
        return None
    return _state.frames[-1].replica or _state.frames[-1].builder


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Makes `frame` the calling thread's context for a while."""
    frame = Frame(*frame)  # found again by its identity, also when a frame is entered twice
    frames = _state.frames
    frames.append(frame)
    try:
        yield
    finally:
        in_order = frames[-1] is frame
        frames[:] = [entered for entered in frames if entered is not frame]
        if not in_order:
            raise RuntimeError(
                "Device scope nesting error: a strategy's scope was left while another scope that was entered later "
                "is still open. Leave scopes in the opposite order of entering them; prefer `with strategy.scope():`."
            )


def get_strategy() -> Strategy:
    """Returns the current strategy, or the default one outside of any scope.

    Returns:
        A `Strategy`; the default strategy is a singleton that passes everything
        straight through.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.get_strategy().num_replicas_in_sync
    1
    """
    return current_frame().strategy


def has_strategy() -> bool:
    """Whether another strategy than the default one is current.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.has_strategy()
    False
    """
    return current_frame() is not _default[0] and current_frame().strategy is not _default[0].strategy


def get_replica_context() -> ReplicaContext | None:
    """Returns the calling thread's `ReplicaContext`, None in cross-replica context.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.get_replica_context().replica_id_in_sync_group
    0
    """
    return current_frame().replica


def in_cross_replica_context() -> bool:
    """Whether the calling thread is in cross-replica context.

    Example:

    >>> import keras_distrib
    >>> strategy = keras_distrib.OneDeviceStrategy("cpu:0")
    >>> with strategy.scope():
    ...     keras_distrib.in_cross_replica_context()
    True
    """
    return current_frame().replica is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enters a strategy's scope for the rest of the thread's program.

    Args:
        strategy: the strategy to enter instead of the one set before, or None to
            go back to the default strategy.

    Raises:
        RuntimeError: inside a `with strategy.scope():` block.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.experimental_set_strategy(keras_distrib.OneDeviceStrategy("cpu:0"))
    >>> keras_distrib.has_strategy()
    True
    >>> keras_distrib.experimental_set_strategy(None)
    >>> keras_distrib.has_strategy()
    False
    """
    if _state.frames:
        raise RuntimeError(
            "Must not be called inside a `tf.distribute.Strategy` scope. "
            f"Received: strategy={strategy!r}, inside the scope of {current_frame().strategy!r}. "
            "Leave the `with strategy.scope():` block first."
        )
    if strategy is None or strategy is _default[0].strategy:
        _state.set_globally = None
    else:
        _state.set_globally = Frame(strategy, None)


def outside_strategies() -> contextlib.AbstractContextManager[None]:
    """Leaves every strategy for a while: variables made meanwhile are Keras' own."""
    return entered(_default[0])


def require_same_strategy(strategy: Strategy) -> None:
    """Raises if another strategy than this one is current."""
    current = get_strategy()
    if current is not strategy and has_strategy():
        raise RuntimeError(
            f"Mixing different tf.distribute.Strategy objects: {strategy!r} is not {current!r}. "
            "Create one strategy, and use it for everything that works together; leave the other one's scope first."
        )


def require_cross_replica(strategy: Strategy) -> None:
    """Raises in a replica's function, and under another strategy."""
    require_same_strategy(strategy)
    replica = running_replica()
    if replica is not None:
        raise RuntimeError(
            f"{REQUIRES_CROSS_REPLICA}. Received: a call in the function that `run` calls, by {replica!r}. "
            "Make it outside of that function, or in one that `merge_call` calls."
        )

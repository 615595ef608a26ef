"""Runs one function on a strategy's local replicas."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from keras_distrib import context, keras_seam
from keras_distrib.replicas.meeting import LOG_INTERVAL_S, Meeting, Stopped
from keras_distrib.replicas.random_streams import ReplicaSeeds, RunSeeds
from keras_distrib.replicas.replica_context import ReplicaContext, Run
from keras_distrib.replicas.state import ReplicaState
from keras_distrib.replicas.torch_modules import merge_buffers
from keras_distrib.values import detached, regroup, row_counts, select

if TYPE_CHECKING:
    from keras_distrib.strategy import Strategy

logger = logging.getLogger("keras_distrib")


class CallerState:
    """What replicas take over from the thread that called `run`.

    Keras' and torch's settings are those of one thread; a replica's thread
    enters the caller's, with its own device, state and random stream.
    """

    def __init__(self) -> None:
        self.keras = keras_seam.thread_state()
        self.seeds = RunSeeds()
        self.variables = contextvars.copy_context()
        self.grad_enabled = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = {kind: _autocast_of(kind) for kind in ("cpu", "cuda")}
        self.threads = threads_of_caller()
        self.creations: dict[int, dict[Any, list[Any]]] = {}

    @contextlib.contextmanager
    def entered(self, replica: ReplicaContext, state: ReplicaState, seeds: Any) -> Iterator[None]:
        """Makes the calling thread this replica's."""
        with (
            context.entered(context.Frame(replica.strategy, replica)),
            keras_seam.entered_thread_state(self.keras, str(state.device.torch_device), seeds),
            _on_device(state.device.torch_device),
            torch.inference_mode() if self.inference else torch.set_grad_enabled(self.grad_enabled),
            self._autocast(),
            # Backward then runs in the replica's own thread on GPUs too: a collective's
            # gradient waits for the other replicas, which may share the GPU's one thread.
            torch.autograd.set_multithreading_enabled(False),
            state,
        ):
            yield

    @contextlib.contextmanager
    def cross_replica(self, strategy: Strategy) -> Iterator[None]:
        """Makes a replica's thread, the last at a meeting, act for all."""
        with (
            context.entered(context.Frame(strategy, None)),
            keras_seam.entered_thread_state(self.keras, seeds=self.seeds),
            torch.set_grad_enabled(self.grad_enabled),
        ):
            yield

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                if dtype is not None:
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


def _autocast_of(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Division:
    """How the rows of one call's arguments are divided over the local replicas.

    Attributes:
        rows: rows by replica, None if there is no batch that a strategy split.
        shared: the same where all batches in the arguments agree on it.
        active: the replicas that run.
    """

    def __init__(self, strategy: Strategy, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        counted = row_counts((list(args), kwargs))
        self._strategy = strategy
        self._is_counted = bool(counted)
        # Of several batches a replica has rows if it has rows of any; shares are known
        # where all agree.
        self.rows = [max(own) for own in zip(*counted, strict=True)] if counted else None
        self.shared = self.rows if len(counted) == 1 else None
        count = strategy.num_local_replicas
        self.active = [index for index in range(count) if self.rows is None or self.rows[index] > 0]

    def state(self, index: int) -> ReplicaState:
        """A new state for a replica."""
        shared, strategy = self.shared, self._strategy
        return ReplicaState(
            strategy=strategy,
            index=index,
            replica_id=strategy.replica_id(index),
            device=strategy.devices[index],
            num_active=len(self.active),
            rows=None if shared is None else shared[index],
            global_rows=None if shared is None else sum(shared),
            first_row=None if shared is None else sum(shared[:index]),
            is_counted=self._is_counted,
        )


def run(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    observe: Callable[[ReplicaState], contextlib.AbstractContextManager[Any]] | None = None,
) -> Any:
    """Calls `fn` on every local replica that has rows, and regroups the results.

    Args:
        strategy: whose replicas.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        observe: makes a context manager in which the first replica calls it.

    Raises:
        BaseException: what a replica raised, with the replica's number in a note.
    """
    division = Division(strategy, args, kwargs)
    if not division.active:
        return None
    caller = CallerState()
    meeting = Meeting(division.active)
    jobs = {}
    for index in division.active:
        state = division.state(index)
        replica = ReplicaContext(strategy, state.replica_id)
        replica.bind(state, Run(meeting, caller, ReplicaSeeds(caller.seeds, state.replica_id)))
        jobs[index] = (replica, state, _Call(fn, select(index, tuple(args)), select(index, kwargs)))
    _, first, call = jobs[division.active[0]]
    if observe is not None:
        call.watch_with(observe(first))
    if strategy.num_local_replicas == 1:
        replica, state, call = jobs[0]
        with caller.entered(replica, state, seeds=None):
            return detached(call())
    watched = strategy.generator_watch.modes(len(jobs))
    for mode, (_, _, call) in zip(watched or (), jobs.values(), strict=bool(watched)):
        call.watch_with(mode)
    bodies = {index: _body(caller, *job) for index, job in jobs.items()}
    results = run_in_threads(strategy, meeting, bodies, caller.threads)
    strategy.generator_watch.check(watched)
    caller.seeds.keep()
    return finish(strategy, division, [state for _, state, _ in jobs.values()], results)


def finish(strategy: Strategy, division: Division, states: list[ReplicaState], results: list[Any]) -> Any:
    """What follows a step on several replicas: agreement on what they wrote, and one result."""
    active, count = division.active, strategy.num_local_replicas
    merge_buffers(states)
    _keep_attributes(states[0])
    _check_written_alike(states)
    if len(active) < count:
        for variable in {key: variable for state in states for key, variable in state.written.items()}.values():
            variable.follow([state.index for state in states if id(variable) in state.written])
    return detached(regroup(results, active, count, division.rows))


def _keep_attributes(first: ReplicaState) -> None:
    """Leaves the layers the attributes that the first replica's step has set."""
    for (key, name), layer in first.set_attributes.items():
        if (key, name) in first.layer_attributes():
            layer.__dict__[name] = first.layer_attributes()[(key, name)]


def _check_written_alike(states: list[ReplicaState]) -> None:
    """Raises if steps that are written as for one device have set weights apart."""
    written = {key: variable for state in states for key, variable in state.written_alike.items()}
    for variable in written.values():
        first, *others = (variable.components[state.index] for state in states)
        if any(not torch.equal(first, other.to(first.device)) for other in others):
            raise RuntimeError(
                "A step assigned different values to a trainable variable on different replicas, whose copies must "
                f"stay equal. Received: {variable.path}. Update weights with a Keras optimizer, which averages "
                "gradients, or reduce what is assigned with `get_replica_context().all_reduce`."
            )


class _Call:
    """A function with one replica's arguments."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._watches: list[contextlib.AbstractContextManager[Any]] = []

    def watch_with(self, watch: contextlib.AbstractContextManager[Any]) -> None:
        """Makes the call in a context manager."""
        self._watches.append(watch)

    def __call__(self) -> Any:
        with contextlib.ExitStack() as stack:
            for watch in self._watches:
                stack.enter_context(watch)
            return self._fn(*self._args, **self._kwargs)


def run_in_threads(
    strategy: Strategy, meeting: Meeting, bodies: dict[int, Callable[[], Any]], threads: int
) -> list[Any]:
    """Runs one function for each replica in its thread, and gives their results in order.

    Args:
        strategy: whose threads.
        meeting: where the replicas meet.
        bodies: by replica what its thread calls.
        threads: torch's threads of the caller, which the replicas share.

    Raises:
        BaseException: what the first replica that failed raised.
    """
    outcomes = _Outcomes(list(bodies))
    share = max(1, threads // len(bodies))
    pool = strategy.pools.take()
    try:
        for index, body in bodies.items():
            pool.submit(index, _job(meeting, outcomes, index, body, share))
        outcomes.wait(meeting)
    except BaseException as error:
        meeting.stop(error)
        pool.abandon()  # a thread may still be busy: do not lend it out again
        raise
    strategy.pools.give_back(pool)
    _raise_first(strategy, meeting, outcomes.errors())
    return outcomes.results()


def run_in_one_thread(strategy: Strategy, body: Callable[[], Any], threads: int) -> Any:
    """Runs what acts for all replicas in the first one's thread, with its share of the cores."""
    meeting = Meeting([0])
    outcomes = _Outcomes([0])
    pool = strategy.pools.take()
    try:
        pool.submit(0, _job(meeting, outcomes, 0, body, max(1, threads // strategy.num_local_replicas)))
        outcomes.wait(meeting)
    except BaseException:
        pool.abandon()
        raise
    strategy.pools.give_back(pool)
    for _, error in outcomes.errors():
        raise error
    return outcomes.results()[0]


def _body(caller: CallerState, replica: ReplicaContext, state: ReplicaState, call: _Call) -> Callable[[], Any]:
    variables = caller.variables.copy()

    def body() -> Any:
        with caller.entered(replica, state, replica.seeds):
            return variables.run(call)

    return body


def _job(
    meeting: Meeting, outcomes: _Outcomes, index: int, body: Callable[[], Any], threads: int
) -> Callable[[], None]:
    def job() -> None:
        result, error = None, None
        try:
            _set_threads(threads)
            result = body()
        except BaseException as raised:  # noqa: BLE001 - handed to the caller, whatever it is
            error = raised
            meeting.stop(raised)
        meeting.leave(index)
        outcomes.put(index, result, error)

    return job


class _IntraOpThreads(threading.local):
    count = 0
    looked = False


_intra_op_threads = _IntraOpThreads()
_set_threads_lock = threading.Lock()


def threads_of_caller() -> int:
    """How many threads torch takes for the calling thread's operations.

    A thread's first look fixes its number, so it must not fall into a change of the
    process' number.
    """
    if _intra_op_threads.looked:
        return torch.get_num_threads()
    with _set_threads_lock:
        _intra_op_threads.looked = True
        return torch.get_num_threads()


def _set_threads(count: int) -> None:
    """Gives the calling replica's thread its share of the cores.

    torch keeps a number for each thread, and one for threads to come that the same
    call sets: that one is put back by a thread to come.
    """
    if _intra_op_threads.count == count:
        return
    torch.get_num_threads()  # a thread's first look sets it to the process' number
    with _set_threads_lock:
        default = _in_new_thread(torch.get_num_threads)
        torch.set_num_threads(count)
        _in_new_thread(lambda: torch.set_num_threads(default))
    _intra_op_threads.count = count


def _in_new_thread(fn: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(fn()), name="keras_distrib torch settings")
    thread.start()
    thread.join()
    return results[0]


class _Outcomes:
    """What the replicas' functions ended with, and the wait for all of them."""

    def __init__(self, running: Sequence[int]) -> None:
        self._running = tuple(running)
        self._ended: dict[int, tuple[Any, BaseException | None]] = {}
        self._all_ended = threading.Event()

    def put(self, index: int, result: Any, error: BaseException | None) -> None:
        self._ended[index] = (result, error)
        if len(self._ended) == len(self._running):
            self._all_ended.set()

    def wait(self, meeting: Meeting) -> None:
        """Waits until no replica is running any more.

        On an exception in the calling thread, such as Ctrl-C, it stops the
        replicas, waits for them, and raises; on a second one it waits no more.
        """
        interrupted: BaseException | None = None
        while True:
            try:
                if self._all_ended.wait(LOG_INTERVAL_S):
                    break
                missing = [index for index in self._running if index not in self._ended]
                logger.info("`Strategy.run` is waiting for replica(s) %s", missing)
            except BaseException as error:
                if interrupted is not None:
                    raise
                interrupted = error
                meeting.stop(error)
        if interrupted is not None:
            raise interrupted

    def results(self) -> list[Any]:
        return [self._ended[index][0] for index in self._running]

    def errors(self) -> list[tuple[int, BaseException]]:
        """What replicas raised, by replica."""
        return [(index, error) for index in self._running if (error := self._ended[index][1]) is not None]


def _raise_first(strategy: Strategy, meeting: Meeting, errors: list[tuple[int, BaseException]]) -> None:
    for index, error in errors:
        if not isinstance(error, Stopped):
            error.add_note(
                f"Raised in replica {strategy.replica_id(index)} of {strategy.num_replicas_in_sync} "
                f"({strategy.devices[index]})."
            )
            raise error
    if errors:
        raise meeting.error or errors[0][1]


def creation_key() -> tuple[Any, ...]:
    """Where in a replica's function the calling code is: the frames up to `run`."""
    frame = sys._getframe(1)
    key = []
    while frame is not None and frame.f_code is not _Call.__call__.__code__:
        key.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(key)

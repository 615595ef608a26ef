"""Which calls of a step run eagerly, are captured, or are replayed."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from keras_distrib import keras_seam
from keras_distrib.capture import replay
from keras_distrib.capture.boundaries import CannotCapture
from keras_distrib.capture.compiler import compile_segments
from keras_distrib.capture.guards import Guards, Observer
from keras_distrib.capture.trace import NotInGraph, Program, UnknownVariable, trace
from keras_distrib.replicas import runner
from keras_distrib.replicas.meeting import Meeting
from keras_distrib.replicas.random_streams import ReplicaSeeds, RunSeeds
from keras_distrib.replicas.replica_context import ReplicaContext, Run
from keras_distrib.replicas.state import ReplicaState
from keras_distrib.values import leaves, select

if TYPE_CHECKING:
    from keras_distrib.strategy import Strategy

logger = logging.getLogger("keras_distrib")

EAGER_RUNS = 8  # of one kind before it is captured, at least 2: the first builds, the last is observed
MOST_KINDS = 8  # of arguments for which a step is captured at a time
MOST_TRACES = 32  # of one step in all
_TIMED_RUNS = 3  # of each way of running replicas, before the faster is chosen

Key = tuple[Any, ...]


class _Plan:
    """What is known of the calls with arguments of one kind."""

    def __init__(self) -> None:
        self.runs = 0
        self.tries = 0
        self.programs: dict[int, Program] = {}
        self.guards: Guards | None = None
        self.timed: dict[bool, list[float]] = {True: [], False: []}
        self.in_threads: bool | None = None

    @property
    def is_captured(self) -> bool:
        return bool(self.programs)

    @property
    def has_calls(self) -> bool:
        return any(program.has_calls for program in self.programs.values())


class CapturedStep:
    """A step that is captured once it has shown what it does, and replayed from then on.

    The first calls with arguments of a kind run eagerly, the last of them is observed,
    and the next is captured. What cannot be captured, or is not proven to be repeatable,
    stays eager, and the log says once why.

    Args:
        strategy: on whose replicas it runs.
        fn: the step.
        name: what the log calls it.
        compiles: whether a compiler makes code of its graphs.
        announce: context manager in which a step is captured.
    """

    def __init__(
        self,
        strategy: Strategy,
        fn: Callable[..., Any],
        name: str,
        compiles: bool = False,
        announce: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.strategy = strategy
        self.fn = fn
        self.name = name
        self.reason: str | None = None  # why it stays eager
        self.traces = 0
        self._compiles = compiles
        self._announce = announce
        self._plans: dict[Key, _Plan] = {}
        self._touched: dict[int, Any] = {}
        self._calls: set[str] = set()  # parts that stay eager code

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.reason is not None:
            return self._eager(args, kwargs)
        division = runner.Division(self.strategy, args, kwargs)
        if len(division.active) < self.strategy.num_local_replicas:
            return self._eager(args, kwargs)
        key = self._key(division, args, kwargs)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan()
        if plan.is_captured:
            if plan.guards is None or plan.guards.hold():
                return self._replay(plan, division, args, kwargs)
            # Something that captured steps took as constant has changed.
            self._plans = {key: _Plan()}
            plan = self._plans[key]
        plan.runs += 1
        if plan.runs < EAGER_RUNS or self._has_enough():
            return self._eager(args, kwargs)
        if plan.runs == EAGER_RUNS:
            return self._observed(args, kwargs)
        with self._announce():
            captured = self._captured(plan, division, args, kwargs)
        return self._replay(plan, division, args, kwargs) if captured else self._eager(args, kwargs)

    def _has_enough(self) -> bool:
        if self.traces >= MOST_TRACES:
            self._give_up(f"what it takes as constant has changed after each of {self.traces} captures")
            return True
        return sum(plan.is_captured for plan in self._plans.values()) >= MOST_KINDS

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._plans = {}
        logger.warning(
            "%s runs eagerly, step by step: %s. It is right, and slower than a captured step.", self.name, reason
        )

    def _eager(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return runner.run(self.strategy, self.fn, args, kwargs)

    def _observed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        observer = Observer()

        @contextlib.contextmanager
        def observe(state: ReplicaState) -> Iterator[None]:
            state.touched = {}
            with observer.watching():
                yield
            self._touched.update(state.touched)

        result = runner.run(self.strategy, self.fn, args, kwargs, observe)
        reason = observer.side_effect()
        if reason is not None:
            self._give_up(reason)
        return result

    def _key(self, division: runner.Division, args: Sequence[Any], kwargs: dict[str, Any]) -> Key:
        parts: list[Any] = [None if division.shared is None else tuple(division.shared)]
        for leaf in leaves((list(args), kwargs)):
            values = getattr(leaf, "values", None)
            parts.append(tuple(_kind(value) for value in values) if isinstance(values, tuple) else _kind(leaf))
        parts += [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), keras_seam.settings()]
        parts += [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
        return tuple(parts)

    def _captured(self, plan: _Plan, division: runner.Division, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Traces the step; says whether it can be replayed."""
        start = time.perf_counter()
        observer = Observer()
        self.traces += 1
        try:
            programs = self._programs(observer, division, args, kwargs)
            reason = observer.side_effect()
            if reason is not None:
                raise CannotCapture(reason)
            if len({program.meetings for program in programs.values()}) > 1:
                raise CannotCapture("its replicas meet in different places")
        except UnknownVariable as error:
            plan.tries += 1
            plan.runs = EAGER_RUNS - 1  # to be observed again
            if plan.tries > 2:
                self._give_up(str(error))
            return False
        except CannotCapture as error:
            if logger.isEnabledFor(logging.DEBUG):  # as text: a traceback would keep the step's tensors
                logger.debug("Capturing %s failed:\n%s", self.name, traceback.format_exc())
            self._give_up(str(error))
            return False
        if self._compiles:
            share = max(1, runner.threads_of_caller() // self.strategy.num_local_replicas)
            for program in {id(program): program for program in programs.values()}.values():
                compile_segments(program.cut, share)
        plan.programs, plan.guards = programs, observer.guards(list(self._touched.values()))
        logger.info("Captured %s in %.1f s", self.name, time.perf_counter() - start)
        return True

    def _programs(
        self, observer: Observer, division: runner.Division, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> dict[int, Program]:
        """A program for each replica; those that do the same share one."""
        hooked = [variable for variable in self._touched.values() if variable._value._backward_hooks]
        if hooked:
            raise CannotCapture(f"there are hooks on the tensor of variable {hooked[0].path}")
        programs: dict[int, Program] = {}
        by_kind: dict[Any, Program] = {}
        for index in division.active:
            own_args, own_kwargs = select(index, tuple(args)), select(index, kwargs)
            kind = (
                None if division.shared is None else division.shared[index],
                str(self.strategy.devices[index].torch_device),
                tuple(_kind(leaf) for leaf in leaves((own_args, own_kwargs))),
            )
            program = by_kind.get(kind)
            while program is None:
                with contextlib.suppress(NotInGraph), observer.watching():
                    program = self._trace(division, index, own_args, own_kwargs)
            if program.replica is None:
                by_kind[kind] = program
            programs[index] = program
        return programs

    def _trace(self, division: runner.Division, index: int, args: Any, kwargs: Any) -> Program:
        state = division.state(index)
        caller = runner.CallerState()
        replica, entered = self._entry(caller, Meeting(division.active), state)

        def enter() -> Any:
            return entered(state)

        del replica
        return trace(state, enter, self.fn, args, kwargs, list(self._touched.values()), self._calls, self._compiles)

    def _entry(self, caller: runner.CallerState, meeting: Meeting, state: ReplicaState) -> Any:
        several = self.strategy.num_local_replicas > 1
        replica = ReplicaContext(self.strategy, state.replica_id)
        replica.bind(state, Run(meeting, caller, ReplicaSeeds(caller.seeds, state.replica_id)))
        return replica, lambda own: caller.entered(replica, own, replica.seeds if several else None)

    def _replay(self, plan: _Plan, division: runner.Division, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        several = self.strategy.num_local_replicas > 1
        seeds = RunSeeds() if several else None
        meeting = Meeting(division.active)
        caller = runner.CallerState() if plan.has_calls else None
        replays = []
        for index in division.active:
            state = division.state(index)
            own = leaves((select(index, tuple(args)), select(index, kwargs)))
            tensors = [leaf for leaf in own if isinstance(leaf, torch.Tensor)]
            own_seeds = None if seeds is None else ReplicaSeeds(seeds, state.replica_id)
            entered = _no_calls if caller is None else self._entry(caller, meeting, state)[1]
            replays.append(replay.ReplicaReplay(plan.programs[index], state, tensors, own_seeds, entered))
        if not several:
            return replay.in_thread(replays[0], meeting)
        results = self._run_replicas(plan, meeting, replays)
        if seeds is not None:
            seeds.keep()
        return runner.finish(self.strategy, division, [own.state for own in replays], results)

    def _run_replicas(self, plan: _Plan, meeting: Meeting, replays: list[replay.ReplicaReplay]) -> list[Any]:
        """Runs replicas in the way that the first replays have shown to be faster."""
        if plan.in_threads is None and plan.has_calls:
            plan.in_threads = True  # in eager code they may meet
        in_threads = plan.in_threads
        if in_threads is None:
            in_threads = len(plan.timed[True]) <= len(plan.timed[False])
        start = time.perf_counter()
        threads = runner.threads_of_caller()
        if in_threads:
            bodies = {own.state.index: _body(own, meeting) for own in replays}
            results = runner.run_in_threads(self.strategy, meeting, bodies, threads)
        else:
            results = runner.run_in_one_thread(self.strategy, lambda: replay.in_turn(replays), threads)
        if plan.in_threads is None:
            plan.timed[in_threads].append(time.perf_counter() - start)
            if all(len(times) > _TIMED_RUNS for times in plan.timed.values()):
                best = {way: min(times[1:]) for way, times in plan.timed.items()}
                plan.in_threads = best[True] < best[False]
        return results


def _body(own: replay.ReplicaReplay, meeting: Meeting) -> Callable[[], Any]:
    return lambda: replay.in_thread(own, meeting)


def _no_calls(state: ReplicaState) -> contextlib.AbstractContextManager[Any]:
    raise RuntimeError(f"A program without eager code has called some. Received: replica {state.index}")


def _kind(leaf: Any) -> Any:
    """What a graph takes as constant of an argument."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad)
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
        return (type(leaf), leaf)
    return (type(leaf), id(leaf))

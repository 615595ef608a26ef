"""Which calls of a step run eagerly, are captured, or are replayed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from keras_distrib import keras_seam
from keras_distrib.capture import replay
from keras_distrib.capture.boundaries import CannotCapture
from keras_distrib.capture.guards import Guards, Observer
from keras_distrib.capture.trace import Program, UnknownVariable, trace
from keras_distrib.replicas import runner
from keras_distrib.replicas.meeting import Meeting
from keras_distrib.replicas.random_streams import ReplicaSeeds, RunSeeds
from keras_distrib.replicas.replica_context import ReplicaContext, Run
from keras_distrib.replicas.state import ReplicaState
from keras_distrib.values import leaves, select

if TYPE_CHECKING:
    from keras_distrib.strategy import Strategy

logger = logging.getLogger("keras_distrib")

EAGER_RUNS = 2  # before a step of one kind is captured: the first builds, the second is observed
MOST_TRACES = 8  # of one step
_TIMED_RUNS = 3  # of each way of running replicas, before the faster is chosen

Key = tuple[Any, ...]


class _Plan:
    """What is known of the calls with arguments of one kind."""

    def __init__(self) -> None:
        self.runs = 0
        self.tries = 0
        self.programs: dict[int, Program] | None = None
        self.guards: Guards | None = None
        self.timed: dict[bool, list[float]] = {True: [], False: []}
        self.in_threads: bool | None = None


class CapturedStep:
    """A step that is captured once it has shown what it does, and replayed from then on.

    The first call with arguments of a kind runs eagerly, the second is observed, the
    third is captured. What cannot be captured, or is not proven to be repeatable,
    stays eager, and the log says once why.

    Args:
        strategy: on whose replicas it runs.
        fn: the step.
        backend: what compiles a graph's segments; None runs them as they are.
        announce: context manager in which a step is captured.
    """

    def __init__(
        self,
        strategy: Strategy,
        fn: Callable[..., Any],
        compile_segment: Callable[..., Any] | None = None,
        announce: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.strategy = strategy
        self.fn = fn
        self._compile = compile_segment
        self._announce = announce
        self._plans: dict[Key, _Plan] = {}
        self._touched: dict[int, Any] = {}
        self.reason: str | None = None  # why it stays eager

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
        if plan.programs is not None:
            if plan.guards is None or plan.guards.hold():
                return self._replay(plan, division, args, kwargs)
            self._forget()
            return self._eager(args, kwargs)
        plan.runs += 1
        if plan.runs < EAGER_RUNS:
            return self._eager(args, kwargs)
        if plan.runs == EAGER_RUNS:
            return self._observed(args, kwargs)
        if sum(plan.programs is not None for plan in self._plans.values()) >= MOST_TRACES:
            return self._eager(args, kwargs)
        with self._announce():
            captured = self._captured(plan, division, args, kwargs)
        return self._replay(plan, division, args, kwargs) if captured else self._eager(args, kwargs)

    def _forget(self) -> None:
        """Starts anew: something that captured steps took as constant has changed."""
        self._plans = {}

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        name = getattr(self.fn, "_keras_distrib_name", None) or getattr(self.fn, "__qualname__", repr(self.fn))
        logger.warning("%s runs eagerly, step by step: %s. It is right, and slower than a captured step.", name, reason)

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
        """Traces the step, once for each number of rows."""
        start = time.perf_counter()
        observer = Observer()
        programs: dict[int, Program] = {}
        by_kind: dict[Any, Program] = {}
        try:
            for index in division.active:
                own_args, own_kwargs = select(index, tuple(args)), select(index, kwargs)
                kind = (
                    None if division.shared is None else division.shared[index],
                    str(self.strategy.devices[index].torch_device),
                    tuple(_kind(leaf) for leaf in leaves((own_args, own_kwargs))),
                )
                program = by_kind.get(kind)
                if program is None:
                    with observer.watching():
                        program = self._trace(division, index, own_args, own_kwargs)
                    if program.replica is None:
                        by_kind[kind] = program
                    if self._compile is not None:
                        self._compile(program)
                programs[index] = program
            reason = observer.side_effect()
            if reason is not None:
                raise CannotCapture(reason)
            if len({tuple(program.meetings) for program in programs.values()}) > 1:
                raise CannotCapture("its replicas meet in different places")
        except UnknownVariable:
            plan.tries += 1
            if plan.tries > 2:
                self._give_up("it touches other variables at each step")
            else:
                plan.runs = EAGER_RUNS - 1  # to be observed again
            return False
        except CannotCapture as error:
            self._give_up(str(error))
            return False
        plan.programs, plan.guards = programs, observer.guards(list(self._touched.values()))
        logger.info("Captured %s in %.1f s", getattr(self.fn, "__qualname__", self.fn), time.perf_counter() - start)
        return True

    def _trace(self, division: runner.Division, index: int, args: Any, kwargs: Any) -> Program:
        state = division.state(index)
        caller = runner.CallerState()
        replica = ReplicaContext(self.strategy, state.replica_id)
        replica.bind(state, Run(Meeting(division.active), caller, ReplicaSeeds(caller.seeds, state.replica_id)))
        several = self.strategy.num_local_replicas > 1

        def entered() -> Any:
            return caller.entered(replica, state, replica.seeds if several else None)

        return trace(state, entered, self.fn, args, kwargs, list(self._touched.values()))

    def _replay(self, plan: _Plan, division: runner.Division, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        assert plan.programs is not None
        several = self.strategy.num_local_replicas > 1
        seeds = RunSeeds() if several else None
        replays = []
        for index in division.active:
            state = division.state(index)
            own = leaves((select(index, tuple(args)), select(index, kwargs)))
            tensors = [leaf for leaf in own if isinstance(leaf, torch.Tensor)]
            own_seeds = None if seeds is None else ReplicaSeeds(seeds, state.replica_id)
            replays.append(replay.ReplicaReplay(plan.programs[index], state, tensors, own_seeds))
        if not several:
            return replay.in_turn(replays)[0]
        results = self._run_replicas(plan, division, replays)
        if seeds is not None:
            seeds.keep()
        return runner.finish(self.strategy, division, [own.state for own in replays], results)

    def _run_replicas(
        self, plan: _Plan, division: runner.Division, replays: list[replay.ReplicaReplay]
    ) -> list[Any]:
        """Runs replicas in the way that the first replays have shown to be faster."""
        in_threads = plan.in_threads
        if in_threads is None:
            in_threads = len(plan.timed[True]) <= len(plan.timed[False])
        start = time.perf_counter()
        meeting = Meeting(division.active)
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


def _kind(leaf: Any) -> Any:
    """What a graph takes as constant of an argument."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad)
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
        return (type(leaf), leaf)
    return (type(leaf), id(leaf))

"""Where the replicas of one run wait for one another.

Collectives and `merge_call` are meetings: every replica that runs brings a
value, the last to arrive acts on the list of all, and each takes its part of
the result away. A replica that raises, or that ends while another waits, ends
the meeting for all, so that nobody waits for one that will not come.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger("keras_distrib")

TIMEOUT_VARIABLE = "KERAS_DISTRIB_TIMEOUT_SECONDS"
LOG_INTERVAL_S = 30.0


class Stopped(BaseException):
    """Unwinds a replica because the run was stopped elsewhere.

    Not an `Exception`, so that a user's `except Exception` around a collective
    does not swallow it.
    """


def timeout_seconds() -> float:
    """How long a replica waits for the others, in seconds."""
    text = os.environ.get(TIMEOUT_VARIABLE, "1800")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value <= 0:
        raise ValueError(f"{TIMEOUT_VARIABLE} must be a positive number of seconds. Received: {text!r}")
    return value


class Meeting:
    """The meeting point of one run's replicas.

    Args:
        participants: local indices of the replicas that run, ascending.
    """

    def __init__(self, participants: Sequence[int]) -> None:
        self.participants = tuple(participants)
        self.error: BaseException | None = None
        self._timeout = timeout_seconds()
        self._condition = threading.Condition()
        self._name: str | None = None
        self._arrived: dict[int, Any] = {}
        self._left: set[int] = set()
        self._results: dict[int, Any] = {}
        self._generation = 0

    def meet(self, index: int, name: str, value: Any, action: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Waits for all replicas; the last one runs `action` for all.

        Args:
            index: the calling replica.
            name: what this meeting is, the same on all replicas.
            value: what this replica brings.
            action: from all replicas' values, in the order of `participants`,
                to each one's result.

        Returns:
            This replica's result.

        Raises:
            RuntimeError: if the replicas disagree on what to do, or one has
                ended its function already.
            TimeoutError: if a replica does not come.
        """
        with self._condition:
            self._check_running()
            self._check_agreement(index, name)
            self._name = name
            self._arrived[index] = value
            if len(self._arrived) < len(self.participants):
                self._condition.notify_all()  # those in `wait_for_lower`
                generation = self._generation
                self._wait(lambda: self._generation != generation, f"Replica {index} in {name}", self._missing)
                return self._results.pop(index)
            values = [self._arrived[i] for i in self.participants]
        try:
            results = action(values)
        except BaseException as error:
            self.stop(error)
            raise
        with self._condition:
            self._check_running()
            self._results = dict(zip(self.participants, results, strict=True))
            self._arrived.clear()
            self._generation += 1
            self._condition.notify_all()
            return self._results.pop(index)

    def leave(self, index: int) -> None:
        """Says that a replica has ended its function."""
        with self._condition:
            self._left.add(index)
            if self._arrived and self.error is None:
                self._stop(self._different_number(min(self._left), self._name))
            self._condition.notify_all()

    def stop(self, error: BaseException) -> None:
        """Ends the run: every replica unwinds at its next, or current, wait."""
        with self._condition:
            self._stop(error)

    def wait_for_lower(self, index: int) -> None:
        """Waits until the replicas before `index` have ended or wait themselves.

        Whoever creates something shared does it in turn, lowest replica first.
        """

        def running() -> list[int]:
            return [i for i in self.participants if i < index and i not in self._left and i not in self._arrived]

        with self._condition:
            self._check_running()
            self._wait(lambda: not running(), f"Replica {index}, about to create a variable,", running)

    def _missing(self) -> list[int]:
        return [i for i in self.participants if i not in self._arrived]

    def _wait(self, done: Callable[[], bool], who: str, missing: Callable[[], list[int]]) -> None:
        start = time.monotonic()
        next_log = LOG_INTERVAL_S
        while not done():
            self._check_running()
            waited = time.monotonic() - start
            if waited >= self._timeout:
                error = TimeoutError(
                    f"{who} has waited {waited:.0f} s for replica(s) {missing()}. Look for a step that hangs there, "
                    f"or allow longer steps with {TIMEOUT_VARIABLE}. Received: {TIMEOUT_VARIABLE}={self._timeout:g}"
                )
                self._stop(error)
                raise error
            if waited >= next_log:
                logger.warning("%s has waited %.0f s for replica(s) %s", who, waited, missing())
                next_log += LOG_INTERVAL_S
            self._condition.wait(min(next_log, self._timeout) - waited)

    def _check_running(self) -> None:
        if self.error is not None:
            raise Stopped

    def _check_agreement(self, index: int, name: str) -> None:
        error = None
        if self._left:
            error = self._different_number(min(self._left), name)
        elif self._arrived and name != self._name:
            error = RuntimeError(
                "All replicas must make the same replica_context() calls in the same order. "
                f"Received: replica {index} in {name}, replica(s) {sorted(self._arrived)} in {self._name}. "
                "Do not make a collective or merge_call depend on the replica or its data."
            )
        if error is not None:
            self._stop(error)
            raise error

    def _different_number(self, ended: int, name: str | None) -> RuntimeError:
        return RuntimeError(
            "Some replicas made a different number of replica_context().merge_call() calls. "
            f"Received: replica {ended} has returned while others wait in {name}. "
            "Make every replica take the same collectives, optimizer updates and merge_calls."
        )

    def _stop(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._condition.notify_all()

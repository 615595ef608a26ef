"""Replaying a captured step on all replicas, in threads or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from keras_distrib import keras_seam
from keras_distrib.capture.boundaries import Boundary
from keras_distrib.capture.graph import Part
from keras_distrib.capture.trace import Draw, Program, component_of, fill
from keras_distrib.replicas.meeting import Meeting
from keras_distrib.replicas.random_streams import ReplicaSeeds, advance
from keras_distrib.replicas.state import ReplicaState


class ReplicaReplay:
    """One replica's part of a replay.

    Args:
        program: what to run.
        state: the replica's state.
        tensors: the tensors in the step's arguments.
        seeds: the replica's random streams; None where there is one replica.
        entered: gives the context manager in which eager code of the replica runs.
    """

    def __init__(
        self,
        program: Program,
        state: ReplicaState,
        tensors: Sequence[torch.Tensor],
        seeds: ReplicaSeeds | None,
        entered: Callable[[ReplicaState], AbstractContextManager[Any]],
    ) -> None:
        self.program = program
        self.state = state
        self._entered = entered
        index = state.index
        written = {id(variable) for variable in program.local_writes}
        slots: list[Any] = [component_of(v, index, id(v) in written) for v in program.variables]
        slots += tensors
        slots += [self._generator(draw, seeds) for draw in program.draws]
        slots += [None] * (program.cut.size - len(slots))
        for slot, constant in program.cut.constants.items():
            slots[slot] = constant
        self.slots = slots

    def bring(self, part: Part, boundary: Boundary) -> Any:
        """What the replica brings to the boundary at the end of a part."""
        return boundary.pack([self.slots[slot] for slot in part.brought])

    def take(self, part: Part, result: Any) -> None:
        """Takes the replica's result of that boundary."""
        if part.taken:
            for slot, tensor in zip(part.taken, Boundary.unpack(result), strict=True):
                if slot >= 0:
                    self.slots[slot] = tensor

    def call(self, part: Part, boundary: Boundary) -> None:
        """Runs the eager code at the end of a part."""
        self.state.averages_gradients = self.program.averages_gradients
        with self._entered(self.state):
            self.take(part, boundary.action(self.bring(part, boundary)))

    def free(self, part: Part) -> None:
        for slot in part.freed:
            self.slots[slot] = None

    def result(self) -> Any:
        """What the step returns; notes what it has written."""
        state, program = self.state, self.program
        for variable in program.local_writes:
            state.note_write(variable)
        state.written_alike.update(program.written_alike)
        outputs = [self.slots[slot] for slot in program.cut.outputs]
        for position, variable in program.gradients.items():
            component_of(variable, state.index, written=False).grad = outputs[position]
        self.slots = []
        return fill(program, outputs)

    def _generator(self, draw: Draw, seeds: ReplicaSeeds | None) -> torch.Generator:
        if draw.of_run and seeds is not None:
            return seeds.generator(draw.device)
        generator = torch.Generator(draw.device)
        generator.manual_seed(self._seed(draw.seed, seeds))
        return generator

    def _seed(self, seed: Any, seeds: ReplicaSeeds | None) -> int:
        if isinstance(seed, int):
            return keras_seam.drawn(seed)
        if seed is None:
            if seeds is None:
                return keras_seam.drawn(None)
            first, second = seeds.next().tolist()
            return (first + second) & 0xFFFFFFFF
        self.state.note_write(seed.state)
        return advance(component_of(seed.state, self.state.index, written=True), self.state.replica_id)


def in_turn(replays: Sequence[ReplicaReplay]) -> list[Any]:
    """Runs all replicas in the calling thread, segment by segment.

    For programs without eager code, in which replicas may meet.
    """
    with torch.no_grad():
        for number, part in enumerate(replays[0].program.cut.parts):
            for replay in replays[:1] if part.once else replays:
                replay.program.cut.parts[number].segment.run(replay.slots)
            if part.boundary is not None:
                pairs = [(replay, *_part(replay, number)) for replay in replays]
                results = part.boundary.action([replay.bring(own, boundary) for replay, own, boundary in pairs])
                for (replay, own, _), result in zip(pairs, results, strict=True):
                    replay.take(own, result)
            for replay in replays:
                replay.free(replay.program.cut.parts[number])
    return [replay.result() for replay in replays]


def _part(replay: ReplicaReplay, number: int) -> tuple[Part, Any]:
    part = replay.program.cut.parts[number]
    return part, part.boundary


def in_thread(replay: ReplicaReplay, meeting: Meeting) -> Any:
    """Runs one replica in its own thread, and meets the others."""
    index = replay.state.index
    with torch.no_grad():
        for part in replay.program.cut.parts:
            if not part.once or index == meeting.participants[0]:
                part.segment.run(replay.slots)
            boundary = part.boundary
            if boundary is None:
                pass
            elif boundary.is_call:
                replay.call(part, boundary)
            else:
                result = meeting.meet(index, boundary.name, replay.bring(part, boundary), boundary.action)
                replay.take(part, result)
            replay.free(part)
    return replay.result()

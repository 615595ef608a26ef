"""Replaying a captured step on all replicas, in threads or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keras_distrib import keras_seam
from keras_distrib.capture.trace import Draw, Program, component_of, fill
from keras_distrib.replicas.random_streams import ReplicaSeeds, advance
from keras_distrib.replicas.state import ReplicaState


class ReplicaReplay:
    """One replica's part of a replay.

    Args:
        program: what to run.
        state: the replica's state.
        tensors: the tensors in the step's arguments.
        seeds: the replica's random streams; None where there is one replica.
    """

    def __init__(
        self, program: Program, state: ReplicaState, tensors: Sequence[torch.Tensor], seeds: ReplicaSeeds | None
    ) -> None:
        self.program = program
        self.state = state
        index = state.index
        written = {id(variable) for variable in program.local_writes}
        slots: list[Any] = [component_of(v, index, id(v) in written) for v in program.variables]
        slots += tensors
        slots += [self._generator(draw, seeds) for draw in program.draws]
        slots += [None] * (program.cut.size - len(slots))
        self.slots = slots

    def run(self, number: int) -> None:
        """Runs the segment of one part."""
        self.program.cut.parts[number].segment.run(self.slots)

    def bring(self, number: int) -> Any:
        """What the replica brings to the meeting at the end of a part."""
        part = self.program.cut.parts[number]
        return part.boundary.pack([self.slots[slot] for slot in part.brought])

    def take(self, number: int, result: Any) -> None:
        """Takes the replica's result of that meeting."""
        part = self.program.cut.parts[number]
        if part.taken:
            for slot, tensor in zip(part.taken, part.boundary.unpack(result), strict=True):
                if slot >= 0:
                    self.slots[slot] = tensor

    def free(self, number: int) -> None:
        for slot in self.program.cut.parts[number].freed:
            self.slots[slot] = None

    def result(self) -> Any:
        """What the step returns; notes what it has written."""
        state, program = self.state, self.program
        for variable in program.local_writes:
            state.note_write(variable)
        state.written_alike.update(program.written_alike)
        outputs = [self.slots[slot] for slot in program.cut.outputs]
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
    """Runs all replicas in the calling thread, segment by segment."""
    first = replays[0]
    with torch.no_grad():
        for number, part in enumerate(first.program.cut.parts):
            for replay in replays[:1] if part.once else replays:
                replay.run(number)
            if part.boundary is not None:
                results = part.boundary.action([replay.bring(number) for replay in replays])
                for replay, result in zip(replays, results, strict=True):
                    replay.take(number, result)
            for replay in replays:
                replay.free(number)
    return [replay.result() for replay in replays]


def in_thread(replay: ReplicaReplay, meeting: Any) -> Any:
    """Runs one replica in its own thread, and meets the others."""
    index = replay.state.index
    with torch.no_grad():
        for number, part in enumerate(replay.program.cut.parts):
            if not part.once or index == meeting.participants[0]:
                replay.run(number)
            if part.boundary is not None:
                value = replay.bring(number)
                replay.take(number, meeting.meet(index, part.boundary.name, value, part.boundary.action))
            replay.free(number)
    return replay.result()

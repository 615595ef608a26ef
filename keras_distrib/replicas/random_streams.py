"""Random numbers that differ by replica, and repeat from one seed.

Keras' random ops draw a seed for each call, from a `SeedGenerator` or, unseeded,
from the thread's global one. Seed generators hold the same state on every
replica; what they draw is folded with the replica's id, and replica 0 draws what
one device would. For unseeded ops one number is drawn from the caller's
generator per run, and each replica derives its stream from it.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_distrib import context, keras_seam
from keras_distrib.replicas.state import current_state

_GOLDEN_RATIO = 0x9E3779B1  # 2**32 / golden ratio, odd: multiples stay apart modulo 2**32
_MASK = 0xFFFFFFFF


def fold(seed: int, number: int) -> int:
    """Mixes a number into a 32-bit seed (the finalizer of MurmurHash3).

    Source: Austin Appleby, MurmurHash3, `fmix32`, public domain.
    """
    mixed = (seed + (number + 1) * _GOLDEN_RATIO) & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _MASK
    return mixed ^ (mixed >> 16)


def _as_seed(first: int, like: torch.Tensor | None = None) -> torch.Tensor:
    """A pair as Keras' seeds are: the 32 bits as a signed integer, and a counter of 0."""
    signed = first - (1 << 32) if first >= 1 << 31 else first
    if like is not None:
        return torch.tensor([signed, 0], dtype=like.dtype, device=like.device)
    return torch.tensor([signed, 0], dtype=torch.int32)


def fold_replica_into(seed: torch.Tensor) -> torch.Tensor:
    """The calling replica's own version of a drawn seed."""
    state = current_state()
    if state is None or state.replica_id == 0 or seed.is_meta:
        return seed
    first, second = seed.tolist()
    return _as_seed(fold((first + second) & _MASK, state.replica_id), like=seed)


def advance(state: torch.Tensor, replica_id: int) -> int:
    """What a `SeedGenerator` with this state draws for a replica, as an integer; the state goes on.

    Formula: Keras draws (seed, counter), adds 1 to the counter, and seeds with their sum.
    """
    first, second = state.tolist()
    with torch.no_grad():
        state[1].add_(1)
    seed = (first + second) & _MASK
    return seed if replica_id == 0 else fold(seed, replica_id)


class GlobalDraws(TorchDispatchMode):
    """Notes whether what runs in it, in one thread, draws from torch's global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and not getattr(result, "is_meta", False):
            self.seen = self.seen or self._draws(func, args, kwargs)
        return result

    @staticmethod
    def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if "dropout_p" in names:  # attention, which draws only for dropout
            return bool(given.get("dropout_p"))
        return given.get("generator") is None and given.get("train") is not False


class GlobalGeneratorWatch:
    """Warns if a strategy's first steps draw from torch's one global generator.

    Replica threads would draw from it in whatever order they come, so a run does
    not repeat. Watching costs some time at each operation, so it ends after a few runs.
    """

    def __init__(self, runs: int = 3) -> None:
        self._runs = runs

    def modes(self, count: int) -> list[GlobalDraws] | None:
        """One for each replica of a run, None if the run is not watched."""
        if self._runs <= 0:
            return None
        self._runs -= 1
        return [GlobalDraws() for _ in range(count)]

    def check(self, modes: list[GlobalDraws] | None) -> None:
        if modes is not None and any(mode.seen for mode in modes):
            self._runs = 0
            warnings.warn(
                "A replica's step drew random numbers from torch's global generator, which all replicas share: they "
                "come in the order of the threads, and the run does not repeat from its seed. Use keras.random and "
                "Keras layers, or a torch.Generator for each replica.",
                stacklevel=5,
            )


class RunSeeds:
    """The caller's global seed generator, for one run on several replicas.

    In replica context the base of all replicas' streams is drawn from it, once,
    when first needed. In cross-replica context it stands in for the generator.
    """

    def __init__(self) -> None:
        self._generator = keras_seam.existing_seed_generator()
        self._made = False
        self._lock = threading.Lock()
        self._base: int | None = None

    def next(self, ordered: bool = True) -> Any:
        """The caller's generator's next seed."""
        with context.outside_strategies(), keras_seam.without_stateless_scope():
            if self._generator is None:
                self._generator = keras_seam.new_seed_generator()
                self._made = True
            return self._generator.next(ordered)

    def base(self) -> int:
        """One number per run that all replicas' streams are derived from."""
        with self._lock:
            base = self._base
            if base is None:
                first, second = self.next(ordered=False).tolist()
                base = self._base = (first + second) & _MASK
            return base

    def keep(self) -> None:
        """Leaves a generator that was made in the run to the calling thread."""
        if self._made:
            keras_seam.keep_seed_generator(self._generator)


class ReplicaSeeds:
    """Stands in for Keras' global seed generator in a replica's thread."""

    def __init__(self, run: RunSeeds, replica_id: int) -> None:
        self._run = run
        self._replica_id = replica_id
        self._drawn = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def next(self, ordered: bool = True) -> Any:
        """The next seed of this replica's stream."""
        del ordered  # Keras' other order is for its own arithmetic
        seed = fold(fold(self._run.base(), self._replica_id), self._drawn)
        self._drawn += 1
        return _as_seed(seed)

    def generator(self, device: torch.device) -> torch.Generator:
        """This replica's torch generator on a device, for this run."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
            first, _ = self.next().tolist()
            generator.manual_seed(first & _MASK)
        return generator

"""Physical devices, logical devices, and the names users give them.

A *physical device* is hardware: the CPU, or one CUDA GPU. A *logical device* is
a slot of a physical one that holds at most one replica; a physical device has
one slot unless `set_logical_device_configuration` split it. A `Device` is a
logical device resolved to the `torch.device` that its tensors live on.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LOGICAL_DEVICES_VARIABLE = "KERAS_DISTRIB_LOGICAL_DEVICES"

_NAME = re.compile(r"^(?:/(?:physical_)?device:|/)?(cpu|gpu|cuda)(?::(\d+))?$", re.IGNORECASE)


@dataclass(frozen=True)
class PhysicalDevice:
    """One piece of hardware that holds logical devices.

    Attributes:
        name: `"/physical_device:CPU:0"` or `"/physical_device:GPU:<index>"`.
        device_type: `"CPU"` or `"GPU"`.
    """

    name: str
    device_type: str


@dataclass(frozen=True)
class LogicalDevice:
    """One slot that a replica can take.

    Attributes:
        name: `"/device:CPU:<index>"` or `"/device:GPU:<index>"`.
        device_type: `"CPU"` or `"GPU"`.
    """

    name: str
    device_type: str


@dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """One logical device in `set_logical_device_configuration`."""


@dataclass(frozen=True)
class Device:
    """A logical device and the torch device behind it; `str` gives `"cpu:1"`."""

    kind: str
    index: int
    torch_device: torch.device

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


class _Registry:
    """How many logical devices each physical one has; frozen at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._splits: dict[tuple[str, int], int] = {}
        self._in_use = False
        self._environment: str | None = None

    def split(self, kind: str, index: int, count: int) -> None:
        with self._lock:
            if self._in_use and self._splits.get((kind, index), 1) != count:
                raise RuntimeError(
                    "Virtual devices cannot be modified after being initialized: a strategy already uses the logical "
                    f"devices. Received: {kind}:{index} with {count} logical devices. Call "
                    "`set_logical_device_configuration` before the first strategy is created, or set the environment "
                    f"variable {LOGICAL_DEVICES_VARIABLE}."
                )
            self._splits[(kind, index)] = count

    def logical(self, kind: str) -> list[Device]:
        """All logical devices of a kind, in order."""
        with self._lock:
            self._read_environment()
            if kind == "cpu":
                count = self._splits.get(("cpu", 0), 1)
                return [Device("cpu", i, torch.device("cpu")) for i in range(count)]
            devices: list[Device] = []
            for physical in range(_gpu_count()):
                for _ in range(self._splits.get(("gpu", physical), 1)):
                    devices.append(Device("gpu", len(devices), torch.device("cuda", physical)))
            return devices

    def mark_in_use(self) -> None:
        with self._lock:
            self._in_use = True

    def _read_environment(self) -> None:
        text = os.environ.get(LOGICAL_DEVICES_VARIABLE, "")
        if text == self._environment or self._in_use:
            return
        self._environment = text
        for part in filter(None, (part.strip() for part in text.split(","))):
            match = re.fullmatch(r"(cpu|gpu)(?::(\d+))?=(\d+)", part, re.IGNORECASE)
            if match is None or int(match[3]) < 1:
                raise ValueError(
                    f"{LOGICAL_DEVICES_VARIABLE} must be a comma-separated list of `cpu=<count>` or "
                    f"`gpu:<index>=<count>`. Received: {LOGICAL_DEVICES_VARIABLE}={text!r}. "
                    "For two replicas on the CPU set it to `cpu=2`."
                )
            self._splits[(match[1].lower(), int(match[2] or 0))] = int(match[3])


registry = _Registry()


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def physical_devices(kind: str | None = None) -> list[PhysicalDevice]:
    """Physical devices, CPU first; `kind` is `"CPU"`, `"GPU"` or None for both."""
    devices = [PhysicalDevice("/physical_device:CPU:0", "CPU")]
    devices += [PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(_gpu_count())]
    return [device for device in devices if kind is None or device.device_type == kind.upper()]


def visible_names() -> str:
    """The logical devices there are, for an error text."""
    return ", ".join(str(device) for kind in ("cpu", "gpu") for device in registry.logical(kind))


def parse_name(name: object) -> tuple[str, int]:
    """Splits a device name into kind (`"cpu"` or `"gpu"`) and index.

    Raises:
        ValueError: if it is no device name.
        TypeError: if it is of another type than str or `torch.device`.
    """
    if isinstance(name, torch.device):
        name = str(name)
    if isinstance(name, Device | PhysicalDevice | LogicalDevice):
        name = str(name) if isinstance(name, Device) else name.name
    if not isinstance(name, str):
        raise TypeError(
            'A device must be a string such as "cpu:0" or "GPU:1", or a `torch.device`. '
            f"Received: device={name!r} (of type {type(name).__name__})"
        )
    match = _NAME.match(name)
    if match is None:
        if "/job:" in name or "/task:" in name:
            raise ValueError(
                "In-graph multi-worker training with a one-machine strategy is not supported: devices must be local. "
                f"Received: device={name!r}. Visible devices: {visible_names()}. "
                'Name a local device, such as "cpu:0".'
            )
        raise ValueError(
            'A device name is a kind (cpu, gpu, cuda) and an index, such as "cpu:0", "/gpu:1" or "cuda:0". '
            f"Received: device={name!r}. Visible devices: {visible_names()}"
        )
    return ("cpu" if match[1].lower() == "cpu" else "gpu"), int(match[2] or 0)


def resolve(name: object) -> Device:
    """Finds the logical device with that name.

    Raises:
        ValueError: if there is none; the text lists those that are visible.
    """
    kind, index = parse_name(name)
    devices = registry.logical(kind)
    if index >= len(devices):
        hint = (
            "Ask for more logical CPU devices with `keras_distrib.config.set_logical_device_configuration` "
            f"or {LOGICAL_DEVICES_VARIABLE}=cpu={index + 1}."
            if kind == "cpu"
            else "Check CUDA_VISIBLE_DEVICES, or use cpu devices."
        )
        raise ValueError(f"No such device. Received: device={name!r}. Visible devices: {visible_names()}. {hint}")
    registry.mark_in_use()
    return devices[index]


def resolve_all(names: Sequence[object] | None, argument: str) -> tuple[Device, ...]:
    """Resolves a strategy's device list.

    Args:
        names: device names; None or empty means all visible GPUs, or else all
            logical CPUs.
        argument: the argument's name, for error texts.

    Raises:
        ValueError: for a repeated, missing or mixed device.
    """
    if isinstance(names, str | torch.device):
        raise TypeError(f'`{argument}` must be a list of devices, such as ["cpu:0"]. Received: {argument}={names!r}')
    if not names:
        found = registry.logical("gpu") or registry.logical("cpu")
        registry.mark_in_use()
        return tuple(found)
    devices = tuple(resolve(name) for name in names)
    if len(set(devices)) != len(devices):
        raise ValueError(
            f"Duplicated devices in `{argument}`: each replica needs a device of its own. "
            f"Received: {argument}={list(names)!r}. Visible devices: {visible_names()}"
        )
    if len({device.kind for device in devices}) > 1:
        raise ValueError(
            f"`{argument}` must not mix CPU and GPU devices: all replicas compute on one kind. "
            f"Received: {argument}={list(names)!r}. Visible devices: {visible_names()}"
        )
    return devices

"""`CentralStorageStrategy`: variables in one place, computation on all devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_distrib import devices as _devices, variables
from keras_distrib.devices import Device
from keras_distrib.strategy import Strategy


class CentralStorageStrategy(Strategy):
    """Synchronous training with variables stored once.

    Each replica computes on its device; variables live on the parameter device
    and are updated there, once, with gradients summed over replicas.

    Args:
        compute_devices: device names; None means all visible GPUs, or else all
            logical CPUs.
        parameter_device: device name; None means the compute device if there is
            one, else `"cpu:0"`.

    Raises:
        ValueError: for a device that is repeated, missing or of another kind.

    Example:

    >>> import keras_distrib
    >>> strategy = keras_distrib.experimental.CentralStorageStrategy(["cpu:0"])
    >>> str(strategy.parameter_device)
    'cpu:0'
    """

    def __init__(self, compute_devices: Sequence[Any] | None = None, parameter_device: Any = None) -> None:
        super().__init__(_devices.resolve_all(compute_devices, "compute_devices"))
        if parameter_device is not None:
            self._parameter_device = _devices.resolve(parameter_device)
        elif len(self.devices) == 1:
            self._parameter_device = self.devices[0]
        else:
            self._parameter_device = _devices.resolve("cpu:0")

    @property
    def parameter_device(self) -> Device:
        return self._parameter_device

    @property
    def updates_once(self) -> bool:
        return True

    def variable_class(self, options: dict[str, Any]) -> type:
        kind = super().variable_class(options)
        return variables.CentralVariable if kind is variables.MirroredVariable else kind

"""Which devices there are, and how many logical ones each physical one has.

The counterpart of `tf.config`'s device functions. Splitting the CPU into
logical devices gives a bare `MirroredStrategy()` several replicas on any
machine, which is how distributed code is tried without GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_distrib import devices as _devices
from keras_distrib.devices import LogicalDevice, LogicalDeviceConfiguration, PhysicalDevice

__all__ = [
    "LogicalDevice",
    "LogicalDeviceConfiguration",
    "PhysicalDevice",
    "list_logical_devices",
    "list_physical_devices",
    "set_logical_device_configuration",
]


def _check_kind(kind: str | None) -> str | None:
    if kind is None or (isinstance(kind, str) and kind.upper() in ("CPU", "GPU")):
        return kind
    raise ValueError(f'`kind` must be "CPU", "GPU" or None. Received: kind={kind!r}')


def list_physical_devices(kind: str | None = None) -> list[PhysicalDevice]:
    """Lists the machine's CPU and CUDA GPUs.

    Args:
        kind: `"CPU"`, `"GPU"`, or None for both.

    Returns:
        A list of `PhysicalDevice`, the CPU first.

    Raises:
        ValueError: for another kind.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.config.list_physical_devices("CPU")[0].name
    '/physical_device:CPU:0'
    """
    return _devices.physical_devices(_check_kind(kind))


def list_logical_devices(kind: str | None = None) -> list[LogicalDevice]:
    """Lists the devices that replicas can take.

    Args:
        kind: `"CPU"`, `"GPU"`, or None for both.

    Returns:
        A list of `LogicalDevice`, CPUs first.

    Raises:
        ValueError: for another kind.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.config.list_logical_devices("CPU")[0].name
    '/device:CPU:0'
    """
    kind = _check_kind(kind)
    kinds = ("cpu", "gpu") if kind is None else (kind.lower(),)
    return [
        LogicalDevice(f"/device:{device.kind.upper()}:{device.index}", device.kind.upper())
        for name in kinds
        for device in _devices.registry.logical(name)
    ]


def set_logical_device_configuration(
    device: PhysicalDevice | str, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None:
    """Splits a physical device into logical ones, before the first strategy.

    The environment variable `KERAS_DISTRIB_LOGICAL_DEVICES` does the same for a
    script that is not to be changed: `cpu=2`, or `cpu=2,gpu:0=2`. Several
    logical GPUs on one GPU share its memory and compute; they are for tests.

    Args:
        device: a `PhysicalDevice` or its name, such as `"cpu:0"`.
        logical_devices: one `LogicalDeviceConfiguration()` per logical device.

    Raises:
        ValueError: for an unknown device or an empty list.
        TypeError: if an entry is no `LogicalDeviceConfiguration`.
        RuntimeError: if a strategy already uses the devices.

    Example:

    ```python
    cpu = keras_distrib.config.list_physical_devices("CPU")[0]
    keras_distrib.config.set_logical_device_configuration(
        cpu, [keras_distrib.config.LogicalDeviceConfiguration()] * 2)
    strategy = keras_distrib.MirroredStrategy()  # 2 replicas
    ```
    """
    kind, index = _devices.parse_name(device)
    known = [_devices.parse_name(physical) for physical in _devices.physical_devices()]
    if (kind, index) not in known:
        raise ValueError(
            f"No such physical device. Received: device={device!r}. "
            f"Physical devices: {[physical.name for physical in _devices.physical_devices()]}"
        )
    configurations = list(logical_devices)
    for configuration in configurations:
        if not isinstance(configuration, LogicalDeviceConfiguration):
            raise TypeError(
                "`logical_devices` must be a list of `LogicalDeviceConfiguration`. "
                f"Received: logical_devices={logical_devices!r}"
            )
    if not configurations:
        raise ValueError(
            "A physical device needs at least one logical device. "
            f"Received: logical_devices={logical_devices!r}. Pass `[LogicalDeviceConfiguration()] * n`."
        )
    _devices.registry.split(kind, index, len(configurations))

"""`MirroredStrategy`: one replica per device of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_distrib import devices as _devices
from keras_distrib.comm.cross_device_ops import CrossDeviceOps
from keras_distrib.strategy import Strategy


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    There is one replica per device, and each variable has a copy on each,
    kept equal by equal updates: gradients are summed over replicas before the
    optimizer sees them.

    Args:
        devices: device names such as `["gpu:0", "gpu:1"]`. None or an empty list
            means all visible GPUs, or else all logical CPUs; see
            `keras_distrib.config.set_logical_device_configuration`.
        cross_device_ops: how gradients are summed, a `CrossDeviceOps`. None means
            NCCL for several GPUs, else a sum on one device.

    Raises:
        ValueError: for a device that is repeated, missing or of another kind.
        TypeError: if `cross_device_ops` is no `CrossDeviceOps`.

    Example:

    >>> import keras, numpy as np, keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])
    ...     model.compile(optimizer="sgd", loss="mse")
    >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)  # the global batch
    >>> sorted(history.history)
    ['loss']
    """

    def __init__(self, devices: Sequence[Any] | None = None, cross_device_ops: CrossDeviceOps | None = None) -> None:
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(
                "`cross_device_ops` must be a `keras_distrib.CrossDeviceOps`. "
                f"Received: cross_device_ops={cross_device_ops!r}. Pass an instance such as "
                "`keras_distrib.ReductionToOneDevice()`, or None."
            )
        super().__init__(_devices.resolve_all(devices, "devices"), cross_device_ops)

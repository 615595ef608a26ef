"""`OneDeviceStrategy`: everything on one named device."""

from __future__ import annotations

from typing import Any

from keras_distrib import devices as _devices
from keras_distrib.options import ValueContext
from keras_distrib.strategy import Strategy


class OneDeviceStrategy(Strategy):
    """Puts all variables and all computation on one device.

    It takes a program through the same paths as the strategies of several
    replicas, and gives the numbers of a program without one.

    Args:
        device: a device name, such as `"gpu:0"` or `"cpu:0"`.

    Raises:
        ValueError: if there is no such device.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.OneDeviceStrategy("cpu:0").num_replicas_in_sync
    1
    """

    def __init__(self, device: Any) -> None:
        super().__init__([_devices.resolve(device)])

    def experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        return value_fn(ValueContext())

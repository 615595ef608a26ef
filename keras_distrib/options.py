"""Enumerations and option records that calls take."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReduceOp(enum.Enum):
    """How values of several replicas become one.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.ReduceOp.SUM
    <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def from_name(cls, op: ReduceOp | str) -> ReduceOp:
        """Accepts a member or its name in any case.

        Raises:
            ValueError: for another name.
            TypeError: for another type.
        """
        if isinstance(op, cls):
            return op
        if not isinstance(op, str):
            raise TypeError(
                "Expected `reduce_op` to be a `tf.distribute.ReduceOp`. "
                f'Received: reduce_op={op!r}. Pass `keras_distrib.ReduceOp.SUM`, `MEAN`, or "sum", "mean".'
            )
        try:
            return cls(op.upper())
        except ValueError:
            raise ValueError(
                f"{op.upper()!r} is not a valid ReduceOp. Received: reduce_op={op!r}. "
                'Pass `keras_distrib.ReduceOp.SUM`, `MEAN`, or "sum", "mean".'
            ) from None


class VariableAggregation(enum.StrEnum):
    """How a variable combines what replicas write or hold; Keras' names.

    Example:

    >>> import keras, keras_distrib
    >>> with keras_distrib.MirroredStrategy(["cpu:0"]).scope():
    ...     variable = keras.Variable(1.0, aggregation=keras_distrib.VariableAggregation.SUM)
    >>> variable.aggregation == "sum"
    True
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class VariableSynchronization(enum.StrEnum):
    """When a variable's components are brought together; Keras' names.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.VariableSynchronization.ON_READ == "on_read"
    True
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, accepted for scripts written for TPUs.

    They have no effect on CPUs and GPUs.

    Attributes:
        experimental_enable_dynamic_batch_size: no effect.
        experimental_bucketizing_dynamic_shape: no effect.
        experimental_xla_options: no effect.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.get_strategy().run(lambda: 1, options=keras_distrib.RunOptions())
    1
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object | None = None


@dataclass(frozen=True)
class ValueContext:
    """What `experimental_distribute_values_from_function` hands its function.

    Attributes:
        replica_id_in_sync_group: the replica the value is for.
        num_replicas_in_sync: how many replicas there are.

    Example:

    >>> import keras_distrib
    >>> print(keras_distrib.experimental.ValueContext())
    tf.distribute.ValueContext(replica id 0,  total replicas in sync: 1)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f" total replicas in sync: {self.num_replicas_in_sync})"
        )

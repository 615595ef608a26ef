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


class AutoShardPolicy(enum.Enum):
    """How a dataset is divided over the workers of a cluster.

    `AUTO` takes FILE for a source of files with at least one for each worker, else
    DATA. With `FILE` each worker reads files of its own, with `DATA` its rows of
    every batch, and with `OFF` everything. `HINT` is for `tf.data` pipelines that
    say themselves where to shard.

    Example:

    >>> import keras_distrib
    >>> options = keras_distrib.InputOptions(auto_shard_policy=keras_distrib.AutoShardPolicy.DATA)
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    HINT = "HINT"
    OFF = "OFF"


class InputReplicationMode(enum.Enum):
    """How often `distribute_datasets_from_function` calls its function.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.InputReplicationMode("PER_WORKER")
    <InputReplicationMode.PER_WORKER: 'PER_WORKER'>
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """How a distributed dataset reads, splits and copies batches.

    Attributes:
        experimental_fetch_to_device: whether batches are copied to the replicas'
            devices ahead of their step; None means True. With False they stay on the
            CPU until a step uses them.
        experimental_replication_mode: `PER_REPLICA` calls the function of
            `distribute_datasets_from_function` once for each replica, `PER_WORKER`
            once.
        experimental_place_dataset_on_device: accepted with `PER_REPLICA` and without
            fetching ahead, as in the original; the source decides where its tensors
            are.
        experimental_per_replica_buffer_size: how many batches of each replica are
            read ahead with `PER_REPLICA`.
        auto_shard_policy: an `AutoShardPolicy`, for several workers.
        batch_size: global batch size, for sources of rows: arrays, map-style
            datasets, data frames.
        prefetch: how many global batches are read ahead; None means as many as
            replicas for a dataset, and none for a dataset function.

    Raises:
        ValueError: for settings that exclude each other, or negative numbers.
        TypeError: for a policy or mode that is none.

    Example:

    >>> import numpy as np, keras_distrib
    >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
    >>> options = keras_distrib.InputOptions(batch_size=2)
    >>> [len(batch) for batch in strategy.experimental_distribute_dataset(np.arange(5), options)]
    [2, 2, 1]
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    batch_size: int | None = None
    prefetch: int | None = None

    def __post_init__(self) -> None:
        if self.experimental_fetch_to_device is None and not self.experimental_place_dataset_on_device:
            object.__setattr__(self, "experimental_fetch_to_device", True)
        if not isinstance(self.experimental_replication_mode, InputReplicationMode):
            raise TypeError(
                "`experimental_replication_mode` must be an `InputReplicationMode`. "
                f"Received: experimental_replication_mode={self.experimental_replication_mode!r}"
            )
        if not isinstance(self.auto_shard_policy, AutoShardPolicy):
            raise TypeError(
                "`auto_shard_policy` must be a `keras_distrib.AutoShardPolicy`. "
                f"Received: auto_shard_policy={self.auto_shard_policy!r}"
            )
        if self.experimental_place_dataset_on_device:
            if self.experimental_fetch_to_device:
                raise ValueError(
                    "`experimental_place_dataset_on_device` can not be set to True when experimental_fetch_to_device "
                    "is True. Received: experimental_place_dataset_on_device=True, experimental_fetch_to_device=True. "
                    "Set one of them."
                )
            if self.experimental_replication_mode is not InputReplicationMode.PER_REPLICA:
                raise ValueError(
                    "When `experimental_place_dataset_on_device` is set for dataset placement, you must also specify "
                    "`PER_REPLICA` for the replication mode. "
                    f"Received: experimental_replication_mode={self.experimental_replication_mode}"
                )
        lengths = {"experimental_per_replica_buffer_size": 0, "batch_size": 1, "prefetch": 0}
        for name, least in lengths.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"`{name}` must be an integer of at least {least}. Received: {name}={value!r}")


@dataclass(frozen=True)
class InputContext:
    """What `distribute_datasets_from_function` tells its function.

    Attributes:
        num_input_pipelines: how many times the function is called, over all workers.
        input_pipeline_id: which of these calls this is, from 0.
        num_replicas_in_sync: how many replicas there are, over all workers.

    Example:

    >>> import keras_distrib
    >>> context = keras_distrib.InputContext(num_replicas_in_sync=2)
    >>> print(context, context.get_per_replica_batch_size(64))
    tf.distribute.InputContext(input pipeline id 0, total: 1) 32
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The batch size of one replica.

        Args:
            global_batch_size: rows of a batch over all replicas.

        Returns:
            An int.

        Raises:
            ValueError: if it does not divide by the number of replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size} is not divisible by `num_replicas_in_sync` "
                f"{self.num_replicas_in_sync}. Choose a multiple, or use `experimental_distribute_dataset`, which "
                "splits any batch."
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"
        )


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

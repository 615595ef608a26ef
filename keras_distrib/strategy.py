"""`Strategy`: the base class of all strategies, and what users call on them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from keras_distrib import context, keras_seam, missing_names, variables
from keras_distrib.comm import reduction
from keras_distrib.comm.cross_device_ops import CrossDeviceOps, default_for
from keras_distrib.data import distributed
from keras_distrib.data.numpy_dataset import NumpyDataset
from keras_distrib.data.pipeline import Pipelines
from keras_distrib.extended import StrategyExtended
from keras_distrib.functions import captured_step
from keras_distrib.options import InputContext, InputOptions, ReduceOp, RunOptions, ValueContext
from keras_distrib.replicas import runner
from keras_distrib.replicas.pool import PoolShelf
from keras_distrib.replicas.random_streams import GlobalGeneratorWatch
from keras_distrib.values import (
    DistributedValues,
    PerReplica,
    components,
    leaves,
    map_structure,
    pack_like,
    select,
)

if TYPE_CHECKING:
    from keras_distrib.data.distributed import DistributedDataset
    from keras_distrib.devices import Device


class Strategy:
    """Runs a computation on several replicas and keeps them in step.

    Use one of its subclasses. Create models, optimizers and metrics inside
    `scope()`; `Model.fit` then trains on all replicas, and `run` calls a
    function on each of them.

    Args:
        devices: the device of each local replica.
        cross_device_ops: how gradients are summed over them; None picks by the
            devices.

    Example:

    >>> import keras_distrib
    >>> issubclass(keras_distrib.MirroredStrategy, keras_distrib.Strategy)
    True
    """

    def __init__(self, devices: Sequence[Device], cross_device_ops: CrossDeviceOps | None = None) -> None:
        self._devices = tuple(devices)
        self.cross_device_ops = cross_device_ops or default_for(self._devices)
        self.pools = PoolShelf(len(self._devices), type(self).__name__)
        self.generator_watch = GlobalGeneratorWatch()
        self.captured_steps: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    # What a subclass decides.

    @property
    def parameter_device(self) -> Device:
        """Where variables are stored that all replicas share."""
        return self._devices[0]

    @property
    def updates_once(self) -> bool:
        """Whether one update serves all replicas, since they share variables."""
        return False

    def variable_class(self, options: dict[str, Any]) -> type:
        """The class of a variable that is created in scope with these options."""
        name = options.get("name") or ""
        if variables.check_synchronization(options) == "on_read":
            return variables.SyncOnReadVariable
        # Keras gives these two no options that would tell them; the names are its own.
        if name == "rnn_state":
            return variables.BatchVariable
        if name.endswith("gradient_accumulator") and not self.updates_once:
            return variables.GradientAccumulator
        return variables.MirroredVariable

    # What users call.

    @property
    def num_replicas_in_sync(self) -> int:
        """Over how many replicas gradients are summed."""
        return len(self._devices)

    @property
    def num_local_replicas(self) -> int:
        """How many of the replicas run in this process."""
        return len(self._devices)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each local replica."""
        return self._devices

    @property
    def extended(self) -> StrategyExtended:
        """Calls for library code; see `StrategyExtended`."""
        return StrategyExtended(self)

    @property
    def cluster_resolver(self) -> None:
        """None: this strategy runs on one machine."""
        return None

    @property
    def input_pipelines(self) -> Pipelines:
        """Which of the cluster's input pipelines this process has: the only one, here."""
        return Pipelines(0, 1, self.num_local_replicas)

    def replica_id(self, index: int) -> int:
        """The id among all replicas of the local replica `index`."""
        return index

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this strategy current, in cross-replica context.

        Variables created inside become distributed ones, so models, optimizers
        and metrics are created here. A strategy's scope may be entered again
        inside itself.

        Returns:
            A context manager that gives the strategy.

        Raises:
            RuntimeError: inside another strategy's scope, or in a replica's
                function.

        Example:

        >>> import keras, keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     variable = keras.Variable(1.0)
        >>> type(variable).__name__
        'MirroredVariable'
        """
        context.require_cross_replica(self)
        with context.entered(context.Frame(self, None)), keras_seam.device(str(self.parameter_device.torch_device)):
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls a function on every replica, each with its part of the arguments.

        A replica whose part of a batch has no rows does not run.

        Args:
            fn: the function. In it, variables are the replica's own, and
                `get_replica_context()` gives its context.
            args: list or tuple of positional arguments. Per-replica values, also
                nested ones, are split; everything else goes to all.
            kwargs: keyword arguments, likewise.
            options: accepted for compatibility.

        Returns:
            What the function returned: the structure of lists, tuples and dicts,
            with a `PerReplica` of tensors where replicas returned different
            objects, and the object where all returned the same one. With one
            replica its plain result. Tensors carry no gradients out of the step.

        Raises:
            ValueError: if `args` is no list or tuple, or the replicas returned
                different structures.
            RuntimeError: in a replica's function or under another strategy.
            Exception: whatever a replica raised, with its number in a note.

        Example:

        >>> import keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> strategy.run(lambda x: x + 1, args=(1,))
        2
        """
        del options
        context.require_cross_replica(self)
        self._check_call(fn, args, kwargs)
        step = captured_step(self, fn)
        return runner.run(self, fn, args, kwargs or {}) if step is None else step(args, kwargs or {})

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None) -> Any:
        """Reduces per-replica values to one, and over an axis if given.

        Args:
            reduce_op: `ReduceOp.SUM` or `MEAN`, or their names.
            value: a per-replica value, or a nested structure of them.
            axis: an axis to reduce within each replica too, or None. With `MEAN`
                each element counts the same, on whichever replica it is.

        Returns:
            A tensor, or the structure with tensors. The mean of integers is
            float64.

        Raises:
            ValueError: for unequal shapes without an axis, an axis out of range,
                or the sum of a value that is the same on all replicas.
            RuntimeError: in a replica's function.

        Example:

        >>> import torch, keras_distrib
        >>> from keras_distrib.values import PerReplica
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> strategy.reduce("SUM", PerReplica([torch.tensor([1.0, 2.0])]), axis=0)
        tensor(3.)
        """
        context.require_cross_replica(self)
        op = ReduceOp.from_name(reduce_op)
        return map_structure(
            lambda leaf: reduction.reduce(op, leaf, axis, self.num_local_replicas, self.cross_device_ops), value
        )

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates per-replica values along an axis.

        Args:
            value: a per-replica value of tensors of rank 1 or more, or a nested
                structure of them; lengths along `axis` may differ.
            axis: the axis, not negative.

        Returns:
            A tensor, or the structure with tensors.

        Raises:
            ValueError: for scalars, an axis out of range, or other shapes that
                differ.
            RuntimeError: in a replica's function.

        Example:

        >>> import torch, keras_distrib
        >>> from keras_distrib.values import PerReplica
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> strategy.gather(PerReplica([torch.ones(2)]), axis=0)
        tensor([1., 1.])
        """
        if context.running_replica() is not None:
            raise RuntimeError(
                f"{context.REQUIRES_CROSS_REPLICA}, and use get_replica_context().all_gather() instead of "
                "`Strategy.gather` in a replica's function."
            )
        context.require_same_strategy(self)
        return map_structure(lambda leaf: reduction.gather(leaf, axis), value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a per-replica value, one per local replica.

        Args:
            value: what `run` returned, or a variable made in this strategy's scope.

        Returns:
            A tuple; of a value that is no per-replica one, a tuple of it alone; of a
            variable the tensors that hold it.

        Example:

        >>> import keras_distrib
        >>> keras_distrib.MirroredStrategy(["cpu:0"]).experimental_local_results(3)
        (3,)
        """
        flat = list(leaves(value))
        if len(flat) == 1 and flat[0] is value:
            found = value.values if isinstance(value, DistributedValues) else components(value)
            return (value,) if found is None else found
        if self.num_local_replicas <= 1:
            return (value,)
        return tuple(
            pack_like(value, [select(index, leaf) for leaf in flat]) for index in range(self.num_local_replicas)
        )

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes a per-replica value from a function that is called for each replica.

        Args:
            value_fn: called with a `ValueContext`.

        Returns:
            A `PerReplica`, or the structure of lists, tuples and dicts with
            `PerReplica` leaves.

        Raises:
            RuntimeError: in a replica's function.

        Example:

        >>> import keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> strategy.experimental_distribute_values_from_function(
        ...     lambda context: context.replica_id_in_sync_group).values
        (0,)
        """
        context.require_cross_replica(self)
        made = [
            value_fn(ValueContext(self.replica_id(index), self.num_replicas_in_sync))
            for index in range(self.num_local_replicas)
        ]
        columns = [list(leaves(structure)) for structure in made]
        return pack_like(made[0], [PerReplica(parts) for parts in zip(*columns, strict=True)])

    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Splits each batch of a dataset over the replicas.

        The next batches are read, split and copied to their devices by a thread while a
        step runs, as many as there are replicas unless `options.prefetch` says
        otherwise. A source that draws random numbers does so in that thread. Memory for
        them is a few global batches.

        Args:
            dataset: batches of the global batch size: a `torch.utils.data.DataLoader`, a
                `keras.utils.PyDataset`, a `tf.data` or grain dataset, a list, a generator
                or a function that yields batches; or rows, with `options.batch_size`:
                arrays and tensors (also in a tuple or dict), pandas frames, a
                `torch.utils.data.Dataset` or a Hugging Face dataset. A batch is a nested
                structure of tensors or arrays with the rows in axis 0.
            options: an `InputOptions`.

        Returns:
            A `DistributedDataset`, an iterable of per-replica batches: the first
            replicas get ceil(rows / replicas) rows, the last what remains,
            perhaps none. With one replica its batches are plain tensors. Batches
            without rows are left out.

        Raises:
            TypeError: if `dataset` is none of these.
            ValueError: for rows without a batch size; at a step, for a batch whose parts
                differ in rows.
            NotImplementedError: for `InputReplicationMode.PER_REPLICA`.
            RuntimeError: in a replica's function.

        Example:

        >>> import torch, keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> dataset = strategy.experimental_distribute_dataset([torch.ones(4, 1)])
        >>> next(iter(dataset)).shape
        torch.Size([4, 1])
        """
        context.require_cross_replica(self)
        return distributed.distribute(dataset, self, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Makes a distributed dataset from a function that makes per-replica batches.

        Nothing is split, sharded or, unless `options.prefetch` says so, read ahead:
        batches go to the replicas one after the other. At the end, replicas for which
        none is left get a batch without rows.

        Args:
            dataset_fn: called with an `InputContext` once for each worker; returns a
                dataset as for `experimental_distribute_dataset`, of batches of the
                per-replica batch size.
            options: an `InputOptions`; with `InputReplicationMode.PER_REPLICA` the
                function is called for each replica and makes its batches alone.

        Returns:
            A `DistributedDataset`.

        Raises:
            TypeError: if `dataset_fn` cannot be called with one argument, or returns no
                dataset.
            NotImplementedError: for `PER_REPLICA` with one replica.
            RuntimeError: in a replica's function.

        Example:

        >>> import torch, keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> def dataset_fn(context):
        ...     return torch.arange(6).split(context.get_per_replica_batch_size(4))
        >>> [len(batch) for batch in strategy.distribute_datasets_from_function(lambda c: list(dataset_fn(c)))]
        [4, 2]
        """
        context.require_cross_replica(self)
        return distributed.distribute_from_function(dataset_fn, self, options)

    def make_experimental_numpy_dataset(self, numpy_input: Any) -> NumpyDataset:
        """A dataset of the rows of arrays.

        Args:
            numpy_input: an array, tensor or frame, or a nested structure of them with
                the same number of rows (axis 0).

        Returns:
            A `NumpyDataset`, for `batch` and then `experimental_distribute_dataset`.

        Raises:
            ValueError: if the arrays differ in rows.

        Example:

        >>> import numpy as np, keras_distrib
        >>> strategy = keras_distrib.MirroredStrategy(["cpu:0"])
        >>> dataset = strategy.make_experimental_numpy_dataset(np.arange(5)).batch(2)
        >>> [batch.tolist() for batch in strategy.experimental_distribute_dataset(dataset)]
        [[0, 1], [2, 3], [4]]
        """
        return NumpyDataset.of(numpy_input)

    if not TYPE_CHECKING:  # the type checker shall still find misspelled names

        def __getattr__(self, name: str) -> Any:
            raise missing_names.error(
                f"Strategy.{name}", f"Strategy.{name}", f"{type(self).__name__!r} object has no attribute {name!r}"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {', '.join(map(str, self._devices))} at {id(self):#x}>"

    def __copy__(self) -> Strategy:
        raise RuntimeError(
            "Must only deepcopy DistributionStrategy. "
            "A copy would have replicas of its own; pass the strategy itself, or create another one."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # Variables refer to the strategy that runs them, which a copied model shares.
        memo[id(self)] = self
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"A strategy cannot be pickled: it holds threads and devices. Received: {self!r}. "
            "Create the strategy in the process that uses it."
        )

    @staticmethod
    def _check_call(fn: Any, args: Any, kwargs: Any) -> None:
        if not callable(fn):
            raise TypeError(f"`fn` must be callable. Received: fn={fn!r}")
        if not isinstance(args, list | tuple):
            raise ValueError(
                "positional args must be a list or tuple. "
                f"Received: args={args!r} (of type {type(args).__name__}). Pass `args=(value,)` for one argument."
            )
        if kwargs is not None and not isinstance(kwargs, dict):
            raise ValueError(f"`kwargs` must be a dict or None. Received: kwargs={kwargs!r}")

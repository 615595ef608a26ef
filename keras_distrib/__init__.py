"""tf.distribute.Strategy for Keras 3 on PyTorch."""

from keras_distrib import keras_seam as _keras_seam  # first: it chooses or checks Keras' backend

# isort: split
from keras_distrib import (
    config as config,
    data as data,
    errors as errors,
    experimental as experimental,
    hooks as _hooks,
    missing_names as _missing_names,
)
from keras_distrib.comm.cross_device_ops import (
    CrossDeviceOps as CrossDeviceOps,
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    NcclAllReduce as NcclAllReduce,
    ReductionToOneDevice as ReductionToOneDevice,
)
from keras_distrib.context import (
    experimental_set_strategy as experimental_set_strategy,
    get_replica_context as get_replica_context,
    get_strategy as get_strategy,
    has_strategy as has_strategy,
    in_cross_replica_context as in_cross_replica_context,
)
from keras_distrib.data.creator import DatasetCreator as DatasetCreator
from keras_distrib.data.distributed import (
    DistributedDataset as DistributedDataset,
    DistributedIterator as DistributedIterator,
)
from keras_distrib.extended import StrategyExtended as StrategyExtended
from keras_distrib.functions import function as function
from keras_distrib.options import (
    AutoShardPolicy as AutoShardPolicy,
    InputContext as InputContext,
    InputOptions as InputOptions,
    InputReplicationMode as InputReplicationMode,
    ReduceOp as ReduceOp,
    RunOptions as RunOptions,
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
)
from keras_distrib.replicas.replica_context import ReplicaContext as ReplicaContext
from keras_distrib.specs import TensorSpec as TensorSpec
from keras_distrib.strategies import default as _default
from keras_distrib.strategies.mirrored import MirroredStrategy as MirroredStrategy
from keras_distrib.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from keras_distrib.strategy import Strategy as Strategy
from keras_distrib.training.checkpoint import (
    Checkpoint as Checkpoint,
    CheckpointManager as CheckpointManager,
    latest_checkpoint as latest_checkpoint,
)
from keras_distrib.training.losses import (
    compute_average_loss as compute_average_loss,
    scale_regularization_loss as scale_regularization_loss,
)
from keras_distrib.training.optimizer import skip_gradients_aggregation as skip_gradients_aggregation
from keras_distrib.training.tape import GradientTape as GradientTape
from keras_distrib.values import DistributedValues as DistributedValues

__version__ = "0.1.0.dev0"

_hooks.install()


def __getattr__(name: str) -> object:
    raise _missing_names.error(
        f"tf.distribute.{name}", f"keras_distrib.{name}", f"module 'keras_distrib' has no attribute {name!r}"
    )

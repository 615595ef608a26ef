"""Names that the original keeps under `tf.distribute.experimental`."""

from keras_distrib import missing_names as _missing_names
from keras_distrib.options import ValueContext as ValueContext
from keras_distrib.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy


def __getattr__(name: str) -> object:
    raise _missing_names.error(
        f"tf.distribute.experimental.{name}",
        f"keras_distrib.experimental.{name}",
        f"module 'keras_distrib.experimental' has no attribute {name!r}",
    )

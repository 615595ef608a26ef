"""Names that the original keeps under `tf.distribute.experimental`."""

from keras_distrib.options import ValueContext as ValueContext
from keras_distrib.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy

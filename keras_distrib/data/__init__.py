"""Sources of batches, their splitting and sharding, and distributed datasets."""

from keras_distrib.data.files import from_files as from_files

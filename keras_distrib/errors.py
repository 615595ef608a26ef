"""The package's own exceptions; everything else is a built-in type."""

from __future__ import annotations


class OutOfRangeError(Exception):
    """A distributed iterator has no more elements.

    `DistributedIterator.get_next` raises it; `next` raises `StopIteration`.

    Example:

    >>> import keras_distrib
    >>> issubclass(keras_distrib.errors.OutOfRangeError, StopIteration)
    False
    """

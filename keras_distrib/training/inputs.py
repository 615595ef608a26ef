"""What `fit`, `evaluate` and `predict` take beyond what Keras reads itself.

Keras accepts a data adapter in place of `x`. One is made here for distributed
datasets, `DatasetCreator`s, datasets of rows and functions that yield batches;
arrays, DataLoaders, PyDatasets, generators, tf.data and grain stay with Keras.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from keras_distrib import keras_seam
from keras_distrib.data.creator import DatasetCreator
from keras_distrib.data.distributed import DistributedDataset, distribute, distribute_from_function, source_of
from keras_distrib.data.sources import LabelledSource, Source, as_source, is_hugging_face
from keras_distrib.data.split import SplitBatch
from keras_distrib.options import InputContext, InputOptions
from keras_distrib.strategy import Strategy
from keras_distrib.values import map_structure

STEPS_NEEDED = (
    "When using a `DatasetCreator`, `steps_per_epoch`, `validation_steps`, or `steps` argument must be provided in "
    "`Model.fit`, `Model.evaluate`, or `Model.predict`."
)


class InputAdapter(keras_seam.DataAdapter):
    """Batches of a source for a model of no strategy, or of a distributed dataset for one of it."""

    ends_by_itself = True

    def __init__(self, dataset: Any, num_batches: int | None, batch_size: int | None) -> None:
        self._dataset = dataset
        self._num_batches = num_batches
        self._batch_size = batch_size
        self._begun: Iterator[Any] | None = None

    def get_torch_dataloader(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        if begun is not None:
            return begun
        if isinstance(self._dataset, DistributedDataset):
            return _split_batches(self._dataset)
        return (map_structure(_as_tensor, batch) for batch in self._dataset)

    def first(self) -> Any:
        """A batch for shapes and dtypes, which stays the first; None if there is none."""
        if isinstance(self._dataset, DistributedDataset):
            first = self._dataset.first()
            return None if first is None else first.sample()
        begun = self.get_torch_dataloader()
        batch = next(begun, None)
        self._begun = itertools.chain([] if batch is None else [batch], begun)
        return batch

    @property
    def num_batches(self) -> int | None:
        return self._num_batches

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    def partial_batch_size(self) -> int | None:
        return None


def _split_batches(dataset: DistributedDataset) -> Iterator[SplitBatch]:
    begun = dataset.begin()
    while True:
        try:
            batch, _ = begun.take()
        except StopIteration:
            return
        yield batch


def adapted(x: Any, arguments: dict[str, Any]) -> Any:
    """What stands in for `x` in Keras' iterator over epochs: an adapter, or `x` itself.

    Args:
        x: what the user gave to `fit`, `evaluate` or `predict`.
        arguments: the iterator's other arguments, such as `batch_size`.

    Raises:
        TypeError: for a `DatasetCreator` whose function returns no dataset.
        ValueError: for a dataset of another strategy, arguments that do not go with
            the dataset, or missing ones.
    """
    strategy = _current.strategy
    if isinstance(x, DatasetCreator):
        _refuse(arguments, "DatasetCreator", "y", "sample_weight", "class_weight")
        if arguments.get("steps_per_epoch") is None:
            raise ValueError(f"{STEPS_NEEDED} Received: steps=None, for {x.dataset_fn!r}")
        options = x.input_options or InputOptions()
        if strategy is None:
            return _adapter(source_of(x.dataset_fn, InputContext(), options), None, arguments)
        return _adapter(distribute_from_function(x.dataset_fn, strategy, options), strategy, arguments)
    if isinstance(x, DistributedDataset):
        _refuse(arguments, "DistributedDataset", "y", "sample_weight", "class_weight", "batch_size")
        return _adapter(x, strategy, arguments)
    if not _is_ours(x):
        return x
    label = arguments.get("y") if is_hugging_face(x) else None
    _refuse(arguments, type(x).__name__, *(() if label else ("y",)), "sample_weight", "class_weight")
    options = InputOptions(batch_size=arguments.get("batch_size") or (32 if _has_rows(x) else None))
    if _has_rows(x) and isinstance(x, torch.utils.data.Dataset):
        shuffle = bool(arguments.get("shuffle")) and not isinstance(x, torch.utils.data.IterableDataset)
        loader = torch.utils.data.DataLoader(x, batch_size=options.batch_size, shuffle=shuffle)
        return keras_seam.TorchDataLoaderAdapter(loader)
    source = as_source(x, options) if label is None else LabelledSource(as_source(x, options), label)
    return _adapter(source if strategy is None else distribute(source, strategy, options), strategy, arguments)


def _adapter(
    dataset: Source | DistributedDataset, strategy: Strategy | None, arguments: dict[str, Any]
) -> InputAdapter:
    if dataset.is_endless and arguments.get("steps_per_epoch") is None:
        raise ValueError(
            "An endless dataset needs the number of steps: `steps_per_epoch` in `fit`, `steps` in `evaluate` and "
            "`predict`, `validation_steps` for validation data. Received: steps=None"
        )
    if isinstance(dataset, DistributedDataset) and dataset.strategy is not strategy:
        raise ValueError(
            "A distributed dataset goes with models of its own strategy. "
            f"Received: a dataset of {dataset.strategy!r}, a model of {strategy or 'no strategy'!r}. "
            "Distribute it with the model's strategy, or pass the dataset itself."
        )
    return InputAdapter(dataset, dataset.num_batches, None)


def _is_ours(x: Any) -> bool:
    """Whether Keras itself does not read the dataset."""
    if isinstance(x, Source) or hasattr(x, "as_source"):
        return True
    if _has_rows(x):
        return True
    return inspect.isroutine(x) or isinstance(x, functools.partial)  # that yields batches


def _has_rows(x: Any) -> bool:
    """Whether it is a dataset of rows: torch's map-style and iterable ones, or Hugging Face's."""
    return isinstance(x, torch.utils.data.Dataset) or is_hugging_face(x)


def _refuse(arguments: dict[str, Any], kind: str, *names: str) -> None:
    for name in names:
        if arguments.get(name) is not None:
            raise ValueError(
                f"When providing `x` as a {kind}, `{name}` should not be passed. Received: {name}={arguments[name]!r}. "
                "It is part of the dataset: give (x, y) or (x, y, sample_weight) in its batches."
            )


class _Current(threading.local):
    """The strategy of the model whose `fit`, `evaluate` or `predict` the thread runs."""

    strategy: Strategy | None = None


_current = _Current()


@contextlib.contextmanager
def reading_for(strategy: Strategy | None) -> Iterator[None]:
    """While a model of a strategy, or of none, reads its data."""
    outer, _current.strategy = _current.strategy, strategy
    try:
        yield
    finally:
        _current.strategy = outer


def _as_tensor(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, torch.Tensor) else keras_seam.convert_to_tensor(leaf)

"""Sources of global batches, one class for each kind of dataset that users have.

A *source* is iterated once for each pass over the data and gives global batches:
nested structures of tensors and arrays with the rows in axis 0. One with random
access can make any batch by its number, so that a worker reads no other's. A
*one-shot* source, such as a generator, has a single pass. `as_source` finds the
class for a dataset; a dataset's own package is imported only if the user has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import torch

from keras_distrib import keras_seam
from keras_distrib.data.sharding import Rows, shard_files
from keras_distrib.options import AutoShardPolicy, InputOptions
from keras_distrib.values import leaves, map_structure


class Source:
    """Global batches, pass after pass; the base class.

    Attributes:
        num_batches: batches of one pass; None if that is not known.
        is_one_shot: whether there is a single pass.
        is_endless: whether a pass is known to have no end.
        has_random_access: whether `batch_rows` makes parts of any batch.
        auto_shard_policy: what the dataset itself says; None if nothing.
        fixed_rows: rows of every batch; None if they may differ.
    """

    num_batches: int | None = None
    is_one_shot = False
    is_endless = False
    has_random_access = False
    auto_shard_policy: AutoShardPolicy | None = None
    fixed_rows: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """A new pass; of a one-shot source, the rest of its only one."""
        raise NotImplementedError

    def iterator(self) -> SourceIterator:
        """A new pass whose place can be saved."""
        return SourceIterator(iter(self))

    def num_rows(self, index: int) -> int:
        """Rows of batch `index`, with random access."""
        raise NotImplementedError

    def batch_rows(self, index: int, rows: Rows) -> Any:
        """Some rows of batch `index`, with random access."""
        raise NotImplementedError

    def for_worker(self, worker: int, workers: int) -> Source | None:
        """With policy FILE, the source of one worker's files; None if there are no files."""
        del worker, workers
        return None


class SourceIterator:
    """One pass over a source, and how far it is.

    Its state is the number of batches taken; those of a source that cannot tell its
    own are skipped to go on.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._taken = 0

    def __iter__(self) -> SourceIterator:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._taken += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"batches": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where another pass was.

        Raises:
            ValueError: if this pass is further, or the source has fewer batches.
        """
        target = int(state["batches"])
        if target < self._taken:
            raise ValueError(
                f"An iterator cannot go back. Received: state={state!r}, batches taken={self._taken}. "
                "Call `set_state` on a new iterator of the dataset."
            )
        self._skip(target, state)

    def _skip(self, target: int, state: dict[str, Any]) -> None:
        while self._taken < target:
            if next(self, _END) is _END:
                raise ValueError(
                    f"The dataset has fewer batches than were taken. Received: state={state!r}, batches={self._taken}"
                )


_END = object()


class IterableSource(Source):
    """Anything that can be iterated again and again, such as a list or a DataLoader."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.num_batches = _length(batches)
        if isinstance(batches, torch.utils.data.DataLoader) and batches.drop_last:
            self.fixed_rows = batches.batch_size

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class StatefulLoaderSource(IterableSource):
    """A DataLoader with `state_dict`, such as torchdata's `StatefulDataLoader`."""

    def iterator(self) -> SourceIterator:
        return _StatefulLoaderIterator(self._batches)


class _StatefulLoaderIterator(SourceIterator):
    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._started = False
        super().__init__(iter(()))

    def __next__(self) -> Any:
        if not self._started:
            self._started, self._batches = True, iter(self._loader)
        return super().__next__()

    def get_state(self) -> dict[str, Any]:
        own = {"loader": self._loader.state_dict()} if self._started else {}
        return super().get_state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        if "loader" not in state or self._started:
            super().set_state(state)
            return
        self._loader.load_state_dict(state["loader"])
        self._taken = int(state["batches"])


class GeneratorSource(IterableSource):
    """A function without arguments that gives a new iterator for each pass."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        made = self._function()
        if not isinstance(made, Iterable):
            raise TypeError(
                "A dataset function must return an iterable of batches, or yield them. "
                f"Received: {self._function!r} returned {made!r} (of type {type(made).__name__})."
            )
        return iter(made)


class OneShotSource(Source):
    """A generator or another iterator: one pass, which a new iterator goes on with."""

    is_one_shot = True

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator


class RandomAccessSource(Source):
    """Rows or batches that can be read in any order; `batch_rows` reads some of one batch."""

    has_random_access = True

    @property
    def count(self) -> int:
        """Batches of one pass, which random access has to know."""
        return self.num_batches or 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield self.batch_rows(index, Rows(0, self.num_rows(index)))

    def iterator(self) -> SourceIterator:
        return _IndexedIterator(self)


class _IndexedIterator(SourceIterator):
    """A pass that goes on at any batch without reading those before it."""

    def __init__(self, source: RandomAccessSource) -> None:
        self._source = source
        super().__init__(iter(source))

    def _skip(self, target: int, state: dict[str, Any]) -> None:
        source = self._source
        if target > source.count:
            super()._skip(target, state)
        self._taken = target
        self._batches = (
            source.batch_rows(index, Rows(0, source.num_rows(index))) for index in range(target, source.count)
        )


class RowsSource(RandomAccessSource):
    """Rows that are put together to batches: `read(start, stop)` gives rows of the whole."""

    def __init__(self, total: int, batch_size: int, read: Callable[[int, int], Any]) -> None:
        self._total = total
        self._batch_size = batch_size
        self._read = read
        self.num_batches = -(-total // batch_size)

    def num_rows(self, index: int) -> int:
        return min(self._batch_size, self._total - index * self._batch_size)

    def batch_rows(self, index: int, rows: Rows) -> Any:
        start = index * self._batch_size
        return self._read(start + rows.start, start + rows.stop)


class HuggingFaceStream(Source):
    """A streamed dataset of the package `datasets`, which is made of files."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        return self._dataset.with_format("numpy").iter(batch_size=self._batch_size)

    def for_worker(self, worker: int, workers: int) -> Source:
        """The files of one worker.

        Raises:
            ValueError: if there are fewer files than workers.
        """
        shard_files(range(self._dataset.num_shards), worker, workers)  # raises
        own = self._dataset.shard(num_shards=workers, index=worker, contiguous=False)
        return HuggingFaceStream(own, self._batch_size)


class LabelledSource(Source):
    """Batches of columns, as pairs of features and label.

    Args:
        source: batches that are dicts of columns.
        label: name of the column that is `y`; the others are `x`, alone if it is one.
    """

    def __init__(self, source: Source, label: Any) -> None:
        self._source = source
        self._label = label
        self.num_batches = source.num_batches

    def __iter__(self) -> Iterator[Any]:
        return map(self._pair, iter(self._source))

    def _pair(self, batch: dict[str, Any]) -> tuple[Any, Any]:
        if not isinstance(self._label, str) or self._label not in batch:
            raise ValueError(f"`y` must be the name of a column. Received: y={self._label!r}, columns={list(batch)}")
        features = {name: column for name, column in batch.items() if name != self._label}
        return (next(iter(features.values())) if len(features) == 1 else features), batch[self._label]


class PyDatasetSource(RandomAccessSource):
    """A `keras.utils.PyDataset` of known length."""

    def __init__(self, dataset: Any) -> None:
        if dataset.num_batches is None:
            raise ValueError(
                "An endless PyDataset cannot be iterated to its end. Received: num_batches=None. "
                "Give it a length, or pass it to `Model.fit` with `steps_per_epoch`."
            )
        self._dataset = dataset
        self.num_batches = dataset.num_batches

    def __iter__(self) -> Iterator[Any]:
        self._dataset.on_epoch_begin()
        yield from (self._dataset[index] for index in range(self.count))
        self._dataset.on_epoch_end()

    def num_rows(self, index: int) -> int:
        return _rows(self._dataset[index])

    def batch_rows(self, index: int, rows: Rows) -> Any:
        return slice_rows(self._dataset[index], rows)


class GrainSource(Source):
    """A `grain.MapDataset`, `IterDataset` or `DataLoader` of batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.num_batches = _length(dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterator())

    def iterator(self) -> SourceIterator:
        dataset = self._dataset
        return _GrainIterator(iter(dataset.to_iter_dataset() if hasattr(dataset, "to_iter_dataset") else dataset))


class _GrainIterator(SourceIterator):
    """A pass that keeps grain's own state."""

    _batches: Any

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"grain": self._batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        if "grain" not in state:
            super().set_state(state)
            return
        self._batches.set_state(state["grain"])
        self._taken = int(state["batches"])


class TFDataSource(Source):
    """A `tf.data.Dataset` of batches; strings stay NumPy arrays of bytes."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        cardinality = int(dataset.cardinality())
        self.num_batches = cardinality if cardinality >= 0 else None
        self.is_endless = cardinality == -1
        policy = dataset.options().experimental_distribute.auto_shard_policy
        self.auto_shard_policy = AutoShardPolicy[policy.name]

        spec = next(iter(leaves(dataset.element_spec)), None)
        shape = getattr(spec, "shape", None)
        self.fixed_rows = shape[0] if shape is not None and shape.rank else None

    def __iter__(self) -> Iterator[Any]:
        return (map_structure(_of_tensorflow, element) for element in self._dataset)

    def for_worker(self, worker: int, workers: int) -> Source | None:
        """The files of one worker, where the pipeline reads files that TensorFlow finds in it.

        Raises:
            ValueError: if it finds fewer files than workers.
        """
        import tensorflow as tf
        from tensorflow.python.data.experimental.ops import distribute  # nothing public shards a pipeline

        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
        try:
            own = TFDataSource(distribute._AutoShardDataset(self._dataset.with_options(options), workers, worker))
            own._first_look()
        except tf.errors.NotFoundError:  # no files in it
            return None
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(
                "Could not apply FILE based sharding: there are fewer files than workers. "
                f"Received: {workers} workers, and from TensorFlow: {error.message}"
            ) from None
        return own

    def _first_look(self) -> None:
        """Sharding fails when a pass begins, not when the dataset is made."""
        next(iter(self._dataset), None)


def _of_tensorflow(leaf: Any) -> Any:
    if type(leaf).__name__ in ("RaggedTensor", "SparseTensor"):
        raise ValueError(
            f"torch has no tensor for a {type(leaf).__name__}. Received: {leaf!r}. Make it dense in the pipeline: "
            "`dataset.map(lambda x: x.to_tensor())`, or `tf.sparse.to_dense`."
        )
    return leaf.numpy() if hasattr(leaf, "numpy") else leaf


def as_source(dataset: Any, options: InputOptions | None = None) -> Source:
    """Finds the source for a dataset.

    Args:
        dataset: what the user gave.
        options: its `batch_size` is for datasets of rows.

    Raises:
        TypeError: for an object of unknown kind.
        ValueError: for a dataset of rows without a batch size.
    """
    options = options or InputOptions()
    if isinstance(dataset, Source):
        return dataset
    if hasattr(dataset, "as_source"):
        return dataset.as_source()
    if isinstance(dataset, keras.utils.PyDataset):
        return PyDatasetSource(dataset)
    if _is_of(dataset, "grain", "MapDataset", "IterDataset", "DataLoader"):
        return GrainSource(dataset)
    if _is_of(dataset, "tensorflow", "DatasetV2"):
        return TFDataSource(dataset)
    if is_hugging_face(dataset):
        return _hugging_face(dataset, options)
    if isinstance(dataset, torch.utils.data.DataLoader):
        stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        return (StatefulLoaderSource if stateful else IterableSource)(dataset)
    if isinstance(dataset, torch.utils.data.Dataset):
        return _torch_dataset(dataset, options)
    if is_arrays(dataset):
        return arrays_source(dataset, _batch_size(dataset, options))
    if isinstance(dataset, str | bytes):
        raise _unknown(dataset)
    if isinstance(dataset, Iterator):
        return OneShotSource(dataset)
    if isinstance(dataset, Iterable):
        return IterableSource(dataset)
    if callable(dataset):
        return GeneratorSource(dataset)
    raise _unknown(dataset)


def is_hugging_face(dataset: Any) -> bool:
    """Whether it is a dataset of the package `datasets`."""
    return _is_of(dataset, "datasets", "Dataset", "IterableDataset")


def _unknown(dataset: Any) -> TypeError:
    return TypeError(
        "`dataset` must be an iterable of batches, such as a torch DataLoader, a keras PyDataset or a list, a function "
        "that yields batches, a grain, Hugging Face or tf.data dataset, or arrays with "
        f"`InputOptions(batch_size=...)`. Received: dataset={dataset!r} (of type {type(dataset).__name__})."
    )


def is_arrays(dataset: Any) -> bool:
    """Whether a dataset is rows in memory: an array, tensor or frame, or a tuple or dict of them."""
    if isinstance(dataset, tuple | dict):
        found = list(leaves(dataset))
        return bool(found) and all(_is_array(leaf) for leaf in found if leaf is not None)
    return _is_array(dataset)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor) or _is_of(value, "pandas", "DataFrame", "Series")


def arrays_source(arrays: Any, batch_size: int) -> RowsSource:
    """Batches of rows of arrays; a batch shares the arrays' storage.

    Raises:
        ValueError: if the arrays differ in rows, or have none.
    """
    arrays = as_rows(arrays)
    return RowsSource(_rows(arrays), batch_size, lambda start, stop: slice_rows(arrays, Rows(start, stop)))


def as_rows(arrays: Any) -> Any:
    """Arrays, tensors and frames, as arrays and tensors that can be sliced; nothing is copied.

    Raises:
        ValueError: if they differ in rows, or there is a scalar among them.
    """
    arrays = map_structure(_array_of_frame, arrays)
    shapes = [tuple(leaf.shape) for leaf in leaves(arrays) if leaf is not None]
    if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            "All arrays of a dataset must have the same number of rows (axis 0). "
            f"Received: shapes={shapes}. Check inputs, targets and sample weights."
        )
    return arrays


def to_rows(leaf: Any) -> Any:
    """One array as a tensor on the CPU; strings and objects stay NumPy arrays."""
    if leaf is None or isinstance(leaf, torch.Tensor | str | bytes):
        return leaf
    leaf = _array_of_frame(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU":
        return leaf
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind in "mM":
            raise ValueError(
                f"torch has no dtype for dates and times. Received: an array of dtype {leaf.dtype}, of shape "
                f'{leaf.shape}. Convert it to numbers: `array.astype("int64")`.'
            )
        if any(stride < 0 for stride in leaf.strides):  # which tensors cannot have
            leaf = leaf.copy()
        if leaf.flags.writeable and leaf.dtype.name in _SHARED_DTYPES:
            return torch.from_numpy(leaf)
    if isinstance(leaf, np.ndarray | np.generic) or hasattr(leaf, "__array__"):
        with keras_seam.device("cpu"):
            return keras_seam.convert_to_tensor(leaf)
    return leaf


# Arrays of these become tensors that share their storage.
_SHARED_DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


def _array_of_frame(leaf: Any) -> Any:
    """A frame's values: numbers where they all are, else objects."""
    if not _is_of(leaf, "pandas", "DataFrame", "Series"):
        return leaf
    array = leaf.to_numpy()
    return _numbers_of(array) if array.dtype == object else array


def _numbers_of(frame: Any) -> Any:
    try:
        return frame.astype("float32")
    except (TypeError, ValueError):
        return frame


def _torch_dataset(dataset: Any, options: InputOptions) -> Source:
    batch_size = _batch_size(dataset, options)
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return IterableSource(torch.utils.data.DataLoader(dataset, batch_size=batch_size))
    collate = torch.utils.data.default_collate
    return RowsSource(
        len(dataset),  # pyright: ignore[reportArgumentType]
        batch_size,
        lambda start, stop: collate([dataset[index] for index in range(start, stop)]) if stop > start else None,
    )


def _hugging_face(dataset: Any, options: InputOptions) -> Source:
    batch_size = _batch_size(dataset, options)
    if not hasattr(dataset, "__len__"):
        return HuggingFaceStream(dataset, batch_size)
    if dataset.format["type"] not in ("numpy", "torch"):
        dataset = dataset.with_format("numpy")
    return RowsSource(len(dataset), batch_size, lambda start, stop: dataset[start:stop])


def _batch_size(dataset: Any, options: InputOptions) -> int:
    if options.batch_size is None:
        raise ValueError(
            f"A dataset of rows needs the global batch size. Received: dataset of type {type(dataset).__name__}, "
            "batch_size=None. Pass `keras_distrib.InputOptions(batch_size=...)`, or for arrays use "
            "`strategy.make_experimental_numpy_dataset(arrays).batch(...)`."
        )
    return options.batch_size


def slice_rows(batch: Any, rows: Rows) -> Any:
    """Some rows of a batch; scalars and None go whole."""

    def part(leaf: Any) -> Any:
        return leaf[rows.start : rows.stop] if getattr(leaf, "ndim", 0) else leaf

    return map_structure(part, batch)


def _rows(batch: Any) -> int:
    return next((int(leaf.shape[0]) for leaf in leaves(batch) if getattr(leaf, "ndim", 0)), 0)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _is_of(value: Any, package: str, *names: str) -> bool:
    """Whether an object's class, or one that it derives from, is of a package; without importing it."""
    classes = type(value).__mro__
    return any(cls.__name__ in names and cls.__module__.partition(".")[0] == package for cls in classes)

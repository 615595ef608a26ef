"""Splitting batches, distributed datasets and iterators."""

import keras
import numpy as np
import pytest
import torch

import keras_distrib as kd
from keras_distrib.data.split import count_rows, split_batch, split_rows


def parts(batch):
    return [value.tolist() for value in batch.values]


def strategy_of(count):
    return kd.MirroredStrategy([f"cpu:{index}" for index in range(count)])


@pytest.mark.parametrize(
    ("batches", "replicas", "expected"),
    [
        ([[0, 1, 2, 3], [4, 5]], 2, [[[0, 1], [2, 3]], [[4], [5]]]),
        ([[0, 1, 2, 3], [4]], 2, [[[0, 1], [2, 3]], [[4], []]]),
        ([[0, 1, 2, 3]], 5, [[[0], [1], [2], [3], []]]),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        ([[0, 1, 2, 3, 4], [5, 6]], 2, [[[0, 1, 2], [3, 4]], [[5], [6]]]),
    ],
)
def test_golden_splits_of_the_original(batches, replicas, expected):
    """Golden values: tf.distribute 2.21, in-memory data."""
    dataset = strategy_of(replicas).experimental_distribute_dataset([torch.tensor(b) for b in batches])
    assert [parts(batch) for batch in dataset] == expected


@pytest.mark.parametrize("replicas", range(1, 6))
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 97])
def test_no_row_is_lost(rows, replicas):
    counts = split_rows(rows, replicas)
    assert sum(counts) == rows
    assert counts == sorted(counts, reverse=True)
    assert len(counts) == replicas


def test_structures_dtypes_and_shared_storage(two):
    batch = {"x": np.ones((3, 2), "float64"), "y": (torch.arange(3), None), "step": 7}
    split, rows = split_batch(batch, two.devices)
    assert rows == 3
    assert split["x"].values[0].dtype == torch.float64
    assert split["x"].rows == (2, 1)
    assert split["y"][1] is None
    assert split["step"] == 7
    assert split["y"][0].values[0].data_ptr() == batch["y"][0].data_ptr()


def test_empty_parts_keep_their_shape():
    split, _ = split_batch(torch.ones(1, 4, 2, dtype=torch.float16), strategy_of(3).devices)
    assert [tuple(value.shape) for value in split.values] == [(1, 4, 2), (0, 4, 2), (0, 4, 2)]
    assert split.values[2].numpy().dtype == np.float16


def test_bad_batches(two):
    with pytest.raises(ValueError, match=r"same number of rows.*Received: shapes=\[\(3,\), \(2, 4\)\]"):
        split_batch((torch.ones(3), torch.ones(2, 4)), two.devices)
    with pytest.raises(ValueError, match="A batch must have rows to be split"):
        split_batch({"a": 1, "b": torch.tensor(2.0)}, two.devices)
    with pytest.raises(TypeError, match="`dataset` must be an iterable of batches.*Received: dataset=3"):
        two.experimental_distribute_dataset(3)
    assert count_rows({"a": None}) is None


def test_iterators(two):
    dataset = two.experimental_distribute_dataset([torch.arange(2), torch.arange(2, 4)])
    assert len(dataset) == 2
    iterator = iter(dataset)
    assert parts(next(iterator)) == [[0], [1]]
    assert parts(iterator.get_next()) == [[2], [3]]
    with pytest.raises(kd.errors.OutOfRangeError, match="End of sequence"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    assert len(list(dataset)) == 2  # a second iteration starts again
    with pytest.raises(ValueError, match=r"next\(iterator\) should be called from outside of replica_fn"):
        two.run(lambda: next(iter(dataset)))


class Squares(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.arange(index * 3, index * 3 + 3), np.ones((3, 1))


def test_sources(two):
    loader = torch.utils.data.DataLoader(torch.arange(5), batch_size=3)
    assert [parts(batch) for batch in two.experimental_distribute_dataset(loader)] == [[[0, 1], [2]], [[3], [4]]]
    dataset = two.experimental_distribute_dataset(Squares())
    assert [parts(x) for x, _ in dataset] == [[[0, 1], [2]], [[3, 4], [5]]]
    assert len(dataset) == 2
    generated = two.experimental_distribute_dataset(torch.arange(n) for n in (1, 2))
    assert [parts(batch) for batch in generated] == [[[0], []], [[0], [1]]]

"""Distributed input: sources, splitting, dataset functions, files, and resuming.

Walks through the calls on scikit-learn's digits, and on 200 small files that it
writes to a temporary directory.

    python examples/distributed_input.py           # all GPUs, or 2 replicas on the CPU
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import tempfile
from pathlib import Path

import keras
import numpy as np
import torch
from sklearn.datasets import load_digits

import keras_distrib as kd

GLOBAL_BATCH_SIZE = 64


def make_model(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((64,)),
                keras.layers.Rescaling(1 / 16),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def splitting(strategy):
    """A global batch is split over the replicas; the last one may have fewer rows."""
    batches = torch.arange(6).split(4)
    for step, batch in enumerate(strategy.experimental_distribute_dataset(list(batches))):
        print(f"step {step}: {[part.tolist() for part in strategy.experimental_local_results(batch)]}")


def arrays(strategy, x, y):
    """Rows in memory: shuffled, batched by the global batch size, and given to fit."""
    dataset = strategy.make_experimental_numpy_dataset((x, y)).shuffle(seed=0).batch(GLOBAL_BATCH_SIZE)
    model = make_model(strategy)
    history = model.fit(dataset, epochs=5, verbose=0)
    print(f"arrays: accuracy {history.history['accuracy'][-1]:.3f}")


def dataset_function(strategy, x, y):
    """A function makes batches of the per-replica batch size, for each worker."""

    def dataset_fn(context):
        rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        shard = torch.utils.data.Subset(rows, range(context.input_pipeline_id, len(rows), context.num_input_pipelines))
        batch_size = context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE)
        return torch.utils.data.DataLoader(shard, batch_size, shuffle=True)

    model = make_model(strategy)
    history = model.fit(strategy.distribute_datasets_from_function(dataset_fn), epochs=5, verbose=0)
    print(f"dataset function: accuracy {history.history['accuracy'][-1]:.3f}")

    def endless(context):
        loader = dataset_fn(context)

        def batches():
            while True:
                yield from loader

        return batches

    steps = -(-len(x) // GLOBAL_BATCH_SIZE)
    history = make_model(strategy).fit(kd.DatasetCreator(endless), epochs=5, steps_per_epoch=steps, verbose=0)
    print(f"DatasetCreator: accuracy {history.history['accuracy'][-1]:.3f}")


def read_file(path):
    data = np.load(path)
    yield data["x"], data["y"]


def files(strategy, x, y):
    """Batches are put together over files, which are read as they are needed."""
    with tempfile.TemporaryDirectory() as folder:
        for index, rows in enumerate(np.array_split(np.arange(len(x)), 200)):
            np.savez(Path(folder) / f"digits-{index:03}.npz", x=x[rows], y=y[rows])
        pattern = str(Path(folder) / "digits-{000..199}.npz")
        dataset = kd.data.from_files(pattern, read_file, GLOBAL_BATCH_SIZE, seed=0, cycle_length=8)
        model = make_model(strategy)
        history = model.fit(dataset, epochs=5, verbose=0)
        print(f"200 files: accuracy {history.history['accuracy'][-1]:.3f}")
        predicted = model.predict(kd.data.from_files(pattern, read_file, GLOBAL_BATCH_SIZE), verbose=0)
        print(f"predicted {len(predicted)} rows in order: accuracy {(predicted.argmax(1) == y).mean():.3f}")


def resuming(strategy, x, y):
    """An iterator's place is saved with a checkpoint."""
    dataset = strategy.experimental_distribute_dataset((x, y), kd.InputOptions(batch_size=GLOBAL_BATCH_SIZE))
    iterator = iter(dataset)
    for _ in range(10):
        next(iterator)
    with tempfile.TemporaryDirectory() as folder:
        path = kd.Checkpoint(iterator=iterator).save(Path(folder) / "place")
        resumed = iter(dataset)
        kd.Checkpoint(iterator=resumed).restore(path).assert_consumed()
    print(f"resumed after 10 of {len(dataset)} batches: {sum(1 for _ in resumed)} are left")


def main():
    if not kd.config.list_physical_devices("GPU") and len(kd.config.list_logical_devices("CPU")) == 1:
        kd.config.set_logical_device_configuration("cpu:0", [kd.config.LogicalDeviceConfiguration()] * 2)
    keras.utils.set_random_seed(0)
    strategy = kd.MirroredStrategy()
    x, y = load_digits(return_X_y=True)
    x = x.astype("float32")
    splitting(strategy)
    arrays(strategy, x, y)
    dataset_function(strategy, x, y)
    files(strategy, x, y)
    resuming(strategy, x, y)


if __name__ == "__main__":
    main()

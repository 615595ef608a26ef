"""`fit` from a grain pipeline: shuffled, augmented and batched by worker threads.

Grain is the answer where a pipeline needs more than arrays: maps, filters, mixes,
files, reading by threads and processes. It needs the extra `grain`:

    pip install "keras-distrib[grain,examples]"
    python examples/grain_input.py                 # all GPUs, or 2 replicas on the CPU
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import grain
import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_distrib as kd

GLOBAL_BATCH_SIZE = 64


class Shift(grain.transforms.RandomMap):
    """Moves a digit by up to one pixel, at random."""

    def random_map(self, element, rng):
        image, label = element
        return np.roll(image, rng.integers(-1, 2, size=2), axis=(0, 1)), label


def main():
    if not kd.config.list_physical_devices("GPU") and len(kd.config.list_logical_devices("CPU")) == 1:
        kd.config.set_logical_device_configuration("cpu:0", [kd.config.LogicalDeviceConfiguration()] * 2)
    keras.utils.set_random_seed(0)
    strategy = kd.MirroredStrategy()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    rows = list(zip(images, labels, strict=True))

    dataset = (
        grain.MapDataset.source(rows[:1500])
        .seed(0)
        .shuffle()
        .random_map(Shift())
        .batch(GLOBAL_BATCH_SIZE)
        .to_iter_dataset(grain.ReadOptions(num_threads=2))
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8, 8, 1)),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    model.fit(strategy.experimental_distribute_dataset(dataset), epochs=12, verbose=2)
    accuracy = model.evaluate(images[1500:], labels[1500:], batch_size=GLOBAL_BATCH_SIZE, verbose=0)[1]
    print(f"test accuracy on {strategy.num_replicas_in_sync} replicas: {accuracy:.3f}")


if __name__ == "__main__":
    main()

"""Speed of `Model.fit`, as a ratio to plain Keras in the same run.

    python tests/benchmarks/run.py                 # all models, 5 interleaved rounds
    python tests/benchmarks/run.py --models mlp --rounds 3

Each round trains every contender for some warm steps, one after the other; the
table gives median samples a second, and the median of each round's ratio to
plain Keras with its spread.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("KERAS_DISTRIB_LOGICAL_DEVICES", "cpu=2")

import keras
import numpy as np
from keras import layers

import keras_distrib as kd


def mlp():
    return [layers.Input((64,)), *(layers.Dense(64, "relu") for _ in range(4)), layers.Dense(10)]


def cnn():
    return [
        layers.Input((28, 28, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(128, "relu"),
        layers.Dense(10),
    ]


def big():
    return [layers.Input((1024,)), *(layers.Dense(2048, "relu") for _ in range(3)), layers.Dense(10)]


# Layers, input shape, global batch, steps of one round.
MODELS = {"mlp": (mlp, (64,), 64, 60), "cnn": (cnn, (28, 28, 1), 128, 10), "big": (big, (1024,), 256, 5)}
CONTENDERS = {
    "plain Keras": lambda: kd.get_strategy(),
    "OneDevice": lambda: kd.OneDeviceStrategy("cpu:0"),
    "Mirrored, 2 replicas": lambda: kd.MirroredStrategy(["cpu:0", "cpu:1"]),
    "CentralStorage, 2 replicas": lambda: kd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


def compiled(build, strategy):
    with strategy.scope():
        model = keras.Sequential(build())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    return model


def measure(name, rounds):
    """Samples a second of each contender, by round."""
    build, shape, batch, steps = MODELS[name]
    x = np.random.default_rng(0).normal(size=(batch * steps, *shape)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, size=(len(x),))
    models = {contender: compiled(build, make()) for contender, make in CONTENDERS.items()}
    speeds = {contender: [] for contender in models}
    for number in range(rounds + 1):
        for contender, model in models.items():
            start = time.perf_counter()
            model.fit(x, y, batch_size=batch, verbose=0)
            if number:  # the first round warms up
                speeds[contender].append(len(x) / (time.perf_counter() - start))
    return speeds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("| model | contender | samples/s | ratio to plain Keras (least to most) |\n|---|---|---|---|")
    for name in arguments.models:
        speeds = measure(name, arguments.rounds)
        for contender, own in speeds.items():
            ratios = [mine / base for mine, base in zip(own, speeds["plain Keras"], strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {name} | {contender} | {statistics.median(own):,.0f} | {spread} |")


if __name__ == "__main__":
    main()

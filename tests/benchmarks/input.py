"""Three figures of distributed input: splitting, reading ahead, and batches a second beside tf.data.

    python tests/benchmarks/input.py

The third needs TensorFlow in the same environment, and is left out without it.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("KERAS_DISTRIB_LOGICAL_DEVICES", "cpu=2")

import numpy as np
import torch

import keras_distrib as kd
from keras_distrib.data.split import split_batch

TENSORFLOW = """
import os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np, tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x, y = np.random.rand(64000, 64).astype("float32"), np.zeros(64000, "int32")
dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(64))
for _ in range(int(sys.argv[1]) + 1):
    start = time.perf_counter()
    count = sum(1 for _ in dataset)
    print(count / (time.perf_counter() - start), flush=True)
    sys.stdin.readline()
"""


def split_milliseconds() -> float:
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    images = torch.zeros(256, 224, 224, 3, dtype=torch.uint8)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        parts, _ = split_batch(images, strategy.devices)
        times.append(time.perf_counter() - start)
    assert parts.values[0].data_ptr() == images.data_ptr()
    return statistics.median(times) * 1000


def overlap(steps: int = 100) -> float:
    """An epoch's time as a part of the longer of reading and computing, each 10 ms a step."""
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])

    def source():
        for _ in range(steps):
            time.sleep(0.01)
            yield torch.ones(64, 64)

    def step(x):
        time.sleep(0.01)

    dataset = strategy.experimental_distribute_dataset(source)
    start = time.perf_counter()
    for batch in dataset:
        strategy.run(step, args=(batch,))
    return (time.perf_counter() - start) / (steps * 0.01)


def batches_per_second() -> float:
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    x, y = np.random.rand(64000, 64).astype("float32"), np.zeros(64000, "int32")
    dataset = strategy.experimental_distribute_dataset(strategy.make_experimental_numpy_dataset((x, y)).batch(64))
    start = time.perf_counter()
    count = sum(1 for _ in dataset)
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"splitting 256 images of 224x224x3 over 2 replicas: {split_milliseconds():.3f} ms, storage shared")
    ratios = [overlap() for _ in range(rounds)]
    print(f"an epoch of 10 ms reading and 10 ms computing a step: {statistics.median(ratios):.2f} times the longer")
    batches_per_second()  # warm
    if importlib.util.find_spec("tensorflow") is None:
        print(f"batches a second: {statistics.median(batches_per_second() for _ in range(rounds)):,.0f}")
        return
    peer = subprocess.Popen(
        [sys.executable, "-c", TENSORFLOW, str(rounds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        peer.stdout.readline()  # warm
        own, others = [], []
        for _ in range(rounds):  # in turn
            own.append(batches_per_second())
            peer.stdin.write("\n")
            peer.stdin.flush()
            others.append(float(peer.stdout.readline()))
    finally:
        peer.kill()
        peer.communicate()
    ratio = statistics.median(a / b for a, b in zip(own, others, strict=True))
    print(
        f"batches a second, 1,000 in memory: {statistics.median(own):,.0f}; tf.data with MirroredStrategy "
        f"{statistics.median(others):,.0f}; ratio {ratio:.1f}"
    )


if __name__ == "__main__":
    main()

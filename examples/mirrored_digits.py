"""Trains a small convnet on real images under MirroredStrategy.

Data: scikit-learn's digits, 1,797 images of 8x8 pixels that its package ships.

    python examples/mirrored_digits.py             # all GPUs, or 2 replicas on the CPU
    python examples/mirrored_digits.py --plot digits.png
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_distrib as kd


def load_data():
    """Images of shape (rows, 8, 8, 1) from 0 to 1, and labels; a fifth is for testing."""
    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")[..., None]
    return train_test_split(images, digits.target, test_size=0.2, random_state=0, stratify=digits.target)


def make_model():
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def plot(path, history, images, labels, predicted):
    """Writes learning curves and a row of predictions as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(9, 5), layout="constrained")
    curves, samples = figure.subfigures(2, 1, height_ratios=[3, 1])
    for axes, name in zip(curves.subplots(1, 2), ("loss", "accuracy"), strict=True):
        axes.plot(history[name], label="train")
        axes.plot(history[f"val_{name}"], label="test")
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.legend()
    for index, axes in enumerate(samples.subplots(1, 10)):
        axes.imshow(images[index, ..., 0], cmap="gray_r")
        axes.set_title(f"{predicted[index]}", color="green" if predicted[index] == labels[index] else "red")
        axes.set_axis_off()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of the global batch")
    parser.add_argument("--plot", metavar="PNG", help="write learning curves and predictions to this file")
    arguments = parser.parse_args()

    if not kd.config.list_physical_devices("GPU") and len(kd.config.list_logical_devices("CPU")) == 1:
        kd.config.set_logical_device_configuration("cpu:0", [kd.config.LogicalDeviceConfiguration()] * 2)
    keras.utils.set_random_seed(0)
    x_train, x_test, y_train, y_test = load_data()

    strategy = kd.MirroredStrategy()
    with strategy.scope():
        model = make_model()
    history = model.fit(
        x_train,
        y_train,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation_data=(x_test, y_test),
    )
    results = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    print(f"test accuracy on {strategy.num_replicas_in_sync} replicas: {results['accuracy']:.4f}")
    if arguments.plot:
        predicted = np.argmax(model.predict(x_test[:10], verbose=0), axis=1)
        plot(arguments.plot, history.history, x_test, y_test, predicted)
        print(f"wrote {arguments.plot}")


if __name__ == "__main__":
    main()

"""One program for every strategy, which saves and loads its model."""

import os
import tempfile

import numpy as np
import tensorflow as tf

keras = tf.keras
layers = tf.keras.layers


def make_strategy(kind):
    if kind == "one_device":
        return tf.distribute.OneDeviceStrategy(device="/cpu:0")
    if kind == "central":
        return tf.distribute.experimental.CentralStorageStrategy()
    if kind == "mirrored":
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()


def build():
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1, kernel_initializer="zeros")])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=keras.losses.MeanSquaredError())
    return model


x = np.linspace(-1.0, 1.0, 40).reshape(20, 2).astype("float32")
y = x[:, :1] - x[:, 1:] + 0.5
results = {}
for kind in ("default", "one_device", "central", "mirrored"):
    strategy = make_strategy(kind)
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        model = build()
    model.fit(x, y, batch_size=10, epochs=5, shuffle=False, verbose=0)
    results[kind] = model.evaluate(x, y, verbose=0)

path = os.path.join(tempfile.mkdtemp(), "model.keras")
model.save(path)
with make_strategy("one_device").scope():
    loaded = keras.models.load_model(path)
close = np.allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
alike = max(results.values()) - min(results.values()) < 1e-5
print(f"alike {alike} loaded {close} has {tf.distribute.has_strategy()} loss {results['default']:.4f}")

"""Fits a regression on arrays with Model.fit under a MirroredStrategy."""

import numpy as np
import tensorflow as tf

gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)

rng = np.random.default_rng(0)
features = rng.normal(size=(120, 4)).astype("float32")
targets = features @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")

strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(4,)),
            tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.Zeros()),
        ]
    )
    model.compile(
        loss=tf.keras.losses.MeanSquaredError(),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.05),
        metrics=[tf.keras.metrics.MeanAbsoluteError(name="mae")],
    )

history = model.fit(features, targets, batch_size=30, epochs=4, shuffle=False, verbose=0)
losses = history.history["loss"]
loss, mae = model.evaluate(features, targets, batch_size=50, verbose=0)
predictions = model.predict(features, batch_size=50, verbose=0)
print(f"fell {losses[-1] < losses[0]} loss {loss:.4f} mae {mae:.4f} predicted {predictions.shape[0]}")

"""Model.fit with checkpoints, a schedule of learning rates and a callback of its own."""

import os
import tempfile

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(2)
inputs = rng.normal(size=(64, 3)).astype("float32")
labels = (inputs.sum(axis=1) > 0).astype("int32")

strategy = tf.distribute.MirroredStrategy()
BUFFER_SIZE = 64
BATCH_SIZE = 8 * 2


def standardize(features, label):
    features = tf.clip_by_value(features, -2.0, 2.0)
    return tf.math.divide(features, 2.0), tf.cast(label, dtype=tf.int64)


train_dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).map(standardize).cache().batch(BATCH_SIZE)

with strategy.scope():
    model = tf.keras.Sequential()
    model.add(tf.keras.layers.Input((3,)))
    model.add(tf.keras.layers.Dense(8, activation=tf.nn.relu, kernel_initializer=tf.keras.initializers.Constant(0.1)))
    model.add(tf.keras.layers.Dense(2, kernel_initializer="zeros"))
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(),
        metrics=["accuracy"],
    )

checkpoint_dir = tempfile.mkdtemp()
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch}.weights.h5")


def decay(epoch):
    if epoch < 2:
        return 0.05
    return 0.01


class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"Learning rate for epoch {epoch + 1} is {self.model.optimizer.learning_rate.numpy():.3f}")


callbacks = [
    tf.keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    tf.keras.callbacks.LearningRateScheduler(decay),
    tf.keras.callbacks.EarlyStopping(monitor="loss", patience=5),
    PrintLR(),
]
history = model.fit(train_dataset, epochs=4, callbacks=callbacks, verbose=0)
before = model.evaluate(train_dataset, verbose=0)[0]
model.load_weights(os.path.join(checkpoint_dir, "ckpt_4.weights.h5"))
after = model.evaluate(train_dataset, verbose=0)[0]
losses = history.history["loss"]
print(
    f"fell {losses[-1] < losses[0]} restored {abs(before - after) < 1e-6} "
    f"files {len(os.listdir(checkpoint_dir))} loss {after:.4f}"
)

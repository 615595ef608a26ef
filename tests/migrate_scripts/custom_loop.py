"""Trains a classifier in a loop of its own, with a tf.data pipeline and tf.function."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, models

BATCH_SIZE_PER_REPLICA = 16
EPOCHS = 3
ROWS = 96

strategy = tf.distribute.MirroredStrategy()
GLOBAL_BATCH_SIZE = 32

rng = np.random.default_rng(1)
images = rng.uniform(0, 255, size=(ROWS, 6, 6)).astype("uint8")
labels = (images.mean(axis=(1, 2)) > 127.5).astype("int64")


def scale(image, label):
    image = tf.cast(image, tf.float32) / 255.0 - 0.5
    return tf.expand_dims(image, -1), label


train_dataset = (
    tf.data.Dataset.from_tensor_slices((images, labels))
    .map(scale, num_parallel_calls=tf.data.AUTOTUNE)
    # 96 rows do not divide into batches of 40.
    .batch(40)
)
test_dataset = tf.data.Dataset.from_tensor_slices((images, labels)).map(scale).batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model():
    return models.Sequential(
        [
            layers.Input((6, 6, 1)),
            layers.Flatten(),
            layers.Dense(2, kernel_initializer="zeros"),
        ]
    )


with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )

    def compute_loss(labels, predictions):
        per_example_loss = loss_object(labels, predictions)
        return tf.nn.compute_average_loss(per_example_loss, global_batch_size=40)

    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    model = create_model()
    optimizer = tf.keras.optimizers.SGD(learning_rate=1.0)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    test_loss.update_state(loss_object(labels, predictions))


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


epoch_losses = []
for epoch in range(EPOCHS):
    total_loss, num_batches = 0.0, 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    epoch_losses.append(float(total_loss / num_batches))
    for x in test_dist_dataset:
        distributed_test_step(x)
    template = "Epoch {}, Loss: {:.4f}, Test Loss: {:.4f}"
    print(template.format(epoch + 1, epoch_losses[-1], float(test_loss.result())))
    last_test_loss = float(test_loss.result())
    test_loss.reset_state()

print(f"fell {epoch_losses[-1] < epoch_losses[0]} train {epoch_losses[-1]:.4f} test {last_test_loss:.4f}")

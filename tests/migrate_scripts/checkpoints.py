"""Saves and resumes a training loop with tf.train.Checkpoint and CheckpointManager."""

import tempfile

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
rng = np.random.default_rng(3)
x = rng.normal(size=(48, 2)).astype("float32")
y = (x @ np.array([[2.0], [1.0]], "float32")).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
dist_dataset = strategy.experimental_distribute_dataset(dataset)
directory = tempfile.mkdtemp()


def build():
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1, kernel_initializer="zeros")])
        optimizer = tf.keras.optimizers.Adam(0.1)
        step = tf.Variable(0, trainable=False, dtype=tf.int64, name="step")
        checkpoint = tf.train.Checkpoint(step=step, optimizer=optimizer, model=model)
    manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    return model, optimizer, checkpoint, manager


def train(model, optimizer, checkpoint, manager, epochs):
    def step_fn(inputs):
        features, targets = inputs
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(model(features, training=True) - targets), axis=-1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=16)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def distributed_step(inputs):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step_fn, args=(inputs,)), axis=None)

    for _ in range(epochs):
        for inputs in dist_dataset:
            loss = distributed_step(inputs)
            checkpoint.step.assign_add(1)
        save_path = manager.save()
        print(f"Saved checkpoint for step {int(checkpoint.step.numpy())}", bool(save_path))
    return float(loss)


first = build()
first_loss = train(*first, epochs=3)
latest = tf.train.latest_checkpoint(directory)
print("latest is the manager's:", latest == first[3].latest_checkpoint)

second = build()
with strategy.scope():
    second[1].build(second[0].trainable_variables)
second[2].restore(second[3].latest_checkpoint)
same = np.allclose(first[0].get_weights()[0], second[0].get_weights()[0])
second_loss = train(*second, epochs=2)
print(
    f"fell {second_loss < first_loss} same {same} step {int(second[2].step.numpy())} "
    f"kept {len(second[3].checkpoints)} loss {second_loss:.4f}"
)

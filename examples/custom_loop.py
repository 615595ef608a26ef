"""A training loop of one's own: `run`, `reduce`, and a gradient tape.

The loop of the tf.distribute guide, with `tf.distribute.` and `tf.` read as
`keras_distrib.`; the data are 10,000 points in a torch DataLoader.

    python examples/custom_loop.py                 # all GPUs, or 2 replicas on the CPU
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch

import keras_distrib as kd

BATCH_SIZE_PER_REPLICA = 64
EPOCHS = 3


def make_data(global_batch_size):
    """Points in a square, labelled by whether they lie in a circle of half its area."""
    points = torch.rand(10_000, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    labels = (points.square().sum(1, keepdim=True) < 2 / torch.pi).float()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points, labels), batch_size=global_batch_size)


def main():
    if not kd.config.list_physical_devices("GPU") and len(kd.config.list_logical_devices("CPU")) == 1:
        kd.config.set_logical_device_configuration("cpu:0", [kd.config.LogicalDeviceConfiguration()] * 2)
    keras.utils.set_random_seed(0)
    strategy = kd.MirroredStrategy()
    global_batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
    dataset = strategy.experimental_distribute_dataset(make_data(global_batch_size))

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((2,)),
                keras.layers.Dense(32, "relu", kernel_regularizer=keras.regularizers.L2(1e-5)),
                keras.layers.Dense(32, "relu"),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adam(1e-2)
        accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)

    # reduction="none" leaves the mean over the global batch to compute_average_loss.
    loss_object = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def train_step(inputs):
        features, labels = inputs
        with kd.GradientTape() as tape:
            predictions = model(features, training=True)
            per_example_loss = loss_object(labels, predictions)
            loss = kd.compute_average_loss(per_example_loss, global_batch_size=global_batch_size)
            if model.losses:
                loss = loss + kd.scale_regularization_loss(sum(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss.detach()

    def distributed_train_step(dist_inputs):
        per_replica_losses = strategy.run(train_step, args=(dist_inputs,))
        return strategy.reduce(kd.ReduceOp.SUM, per_replica_losses, axis=None)

    print(f"{strategy.num_replicas_in_sync} replicas, global batch {global_batch_size}")
    for epoch in range(EPOCHS):
        losses = [float(distributed_train_step(inputs)) for inputs in dataset]
        mean = sum(losses) / len(losses)
        print(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {float(accuracy.result()):.4f}")
        accuracy.reset_state()


if __name__ == "__main__":
    main()

"""A model with a train_step of its own, and a loop with regularization losses."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(4)
features = rng.normal(size=(40, 3)).astype(np.float32)
targets = features.sum(axis=1, keepdims=True).astype(np.float32)

strategy = tf.distribute.MirroredStrategy()


class Regressor(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = tf.keras.layers.Dense(
            4,
            activation=tf.nn.tanh,
            kernel_initializer=tf.keras.initializers.Constant(0.2),
            kernel_regularizer=tf.keras.regularizers.L2(0.01),
        )
        self.out = tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.Constant(0.2))
        self.loss_tracker = tf.keras.metrics.Mean(name="loss")
        self.mae = tf.keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            squares = tf.reduce_sum(tf.square(predictions - y), axis=-1)
            loss = tf.reduce_mean(squares) + tf.add_n(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(squares)
        self.mae.update_state(y, predictions)
        return {m.name: m.result() for m in self.metrics}


with strategy.scope():
    model = Regressor()
    model.compile(optimizer=tf.keras.optimizers.SGD(0.05))
history = model.fit(features, targets, batch_size=20, epochs=3, shuffle=False, verbose=0)
fit_loss = history.history["loss"]

with strategy.scope():
    loop_model = Regressor()
    loop_model(tf.zeros((1, 3)))
    optimizer = tf.keras.optimizers.SGD(0.05)
    mse = tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.NONE)


@tf.function
def distributed_step(inputs):
    def step(x, y):
        with tf.GradientTape() as tape:
            per_example = mse(y, loop_model(x, training=True))
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=20)
            if loop_model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(loop_model.losses))
        gradients = tape.gradient(loss, loop_model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, loop_model.trainable_variables))
        return loss

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=inputs), axis=None)


dataset = tf.data.Dataset.from_tensor_slices((features, targets)).batch(20)
for epoch in range(3):
    for inputs in strategy.experimental_distribute_dataset(dataset):
        loop_loss = distributed_step(inputs)

difference = np.abs(model.get_weights()[0] - loop_model.get_weights()[0]).max()
print(f"fell {fit_loss[-1] < fit_loss[0]} agree {difference < 1e-5} fit {fit_loss[-1]:.4f} loop {float(loop_loss):.4f}")

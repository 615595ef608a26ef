"""Several steps in one tf.function, from an explicit iterator that ends with OutOfRangeError."""

import numpy as np
import tensorflow as tf

STEPS_PER_LOOP = 3
GLOBAL_BATCH_SIZE = 4

strategy = tf.distribute.MirroredStrategy()
values = np.arange(1.0, 25.0, dtype="float32")
dataset = tf.data.Dataset.from_tensor_slices(values).batch(GLOBAL_BATCH_SIZE)

with strategy.scope():
    total = tf.Variable(
        0.0,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def step_fn(batch):
    total.assign_add(tf.reduce_sum(batch))


@tf.function
def train_loop(iterator, steps_per_loop):
    for _ in tf.range(steps_per_loop):
        strategy.run(step_fn, args=(next(iterator),))


iterator = iter(strategy.experimental_distribute_dataset(dataset))
train_loop(iterator, tf.constant(STEPS_PER_LOOP))
half = float(total.numpy())


@tf.function
def one_step(iterator):
    strategy.run(step_fn, args=(iterator.get_next(),))


steps, ended = 0, False
while not ended:
    try:
        one_step(iterator)
        steps += 1
    except tf.errors.OutOfRangeError:
        ended = True

whole = float(total.numpy())
tf.print("steps", steps)
print(f"half {half:.0f} whole {whole:.0f} steps {steps} ended {ended}")

"""Values of each replica: made, reduced, gathered, all-reduced and merged."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
replicas = strategy.num_replicas_in_sync


def value_fn(ctx: tf.distribute.experimental.ValueContext):
    return tf.constant([[float(ctx.replica_id_in_sync_group + 1)] * 2])


distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
local = strategy.experimental_local_results(distributed_values)
total = strategy.reduce(tf.distribute.ReduceOp.SUM, distributed_values, axis=None)
mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, distributed_values, axis=None)
gathered = strategy.gather(distributed_values, axis=0)


def replica_fn(value: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    assert not tf.distribute.in_cross_replica_context()
    everywhere = context.all_reduce(tf.distribute.ReduceOp.SUM, value)
    stacked = context.all_gather(value, axis=0)
    return tf.reduce_sum(everywhere) + tf.cast(tf.shape(stacked)[0], tf.float32)


def run(values):
    return strategy.run(replica_fn, args=(values,))


combined = strategy.experimental_local_results(run(distributed_values))


def merge_fn(strategy, value):
    return strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)


def merging_fn(value):
    return tf.distribute.get_replica_context().merge_call(merge_fn, args=(tf.square(value),))


merged = strategy.experimental_local_results(strategy.run(merging_fn, args=(distributed_values,)))

expected = replicas * (replicas + 1) / 2
checks = [
    len(local) == replicas,
    np.allclose(total.numpy(), expected),
    np.allclose(mean.numpy(), expected / replicas),
    gathered.numpy().shape == (replicas, 2),
    all(float(value) == 2 * expected + replicas for value in combined),
    np.allclose(merged[0].numpy(), sum((i + 1) ** 2 for i in range(replicas))),
]
print(f"checks {checks.count(True)} of {len(checks)}")

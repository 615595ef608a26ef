"""Each input pipeline makes its own dataset with distribute_datasets_from_function."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
GLOBAL_BATCH_SIZE = 8
examples = np.arange(32, dtype="float32").reshape(32, 1)


def dataset_fn(input_context: tf.distribute.InputContext):
    batch_size = input_context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE)
    dataset = tf.data.Dataset.from_tensor_slices((examples, 2.0 * examples))
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    dataset = dataset.batch(batch_size)
    return dataset.prefetch(2)


dist_dataset = strategy.experimental_distribute_datasets_from_function(dataset_fn)


@tf.function
def global_sum(inputs):
    def replica_fn(features, targets):
        assert features.shape[-1] == 1
        return tf.reduce_sum(targets - features)

    per_replica = strategy.run(replica_fn, args=inputs)
    return strategy.reduce("SUM", per_replica, axis=None)


sums = [float(global_sum(inputs)) for inputs in dist_dataset]

with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile("sgd", "mse")

print(f"steps {len(sums)} sum {sum(sums):.0f} rows {GLOBAL_BATCH_SIZE * len(sums)}")

"""Two logical devices on one CPU, another all-reduce, and a signature from element_spec."""

import tensorflow as tf

N_VIRTUAL_DEVICES = 2
physical_devices = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    physical_devices[0], [tf.config.LogicalDeviceConfiguration() for _ in range(N_VIRTUAL_DEVICES)]
)
for i, device in enumerate(tf.config.list_logical_devices("CPU")):
    print(i, device.name)

strategy = tf.distribute.MirroredStrategy(
    devices=["/cpu:0", "/cpu:1"], cross_device_ops=tf.distribute.HierarchicalCopyAllReduce()
)
reducing = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())

global_batch_size = 4
dataset = tf.data.Dataset.from_tensors(([1.0], [2.0])).repeat(12).batch(global_batch_size)
dist_dataset = strategy.experimental_distribute_dataset(dataset)


@tf.function(input_signature=[dist_dataset.element_spec])
def step(per_replica_inputs):
    def step_fn(inputs):
        features, labels = inputs
        return tf.reduce_sum(features * labels)

    return strategy.run(step_fn, args=(per_replica_inputs,))


totals = []
for inputs in dist_dataset:
    output = step(inputs)
    totals.append(float(strategy.reduce("SUM", output, axis=None)))


@tf.function(input_signature=[tf.TensorSpec(shape=[None], dtype=tf.float32)])
def double(x):
    return 2 * x


doubled = double(tf.constant([1.0, 2.0]))
ids = reducing.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group)
id_sum = reducing.reduce(tf.distribute.ReduceOp.SUM, ids, axis=None)
print(
    f"devices {len(tf.config.list_logical_devices('CPU'))} total {sum(totals):.0f} steps {len(totals)} "
    f"doubled {float(tf.reduce_sum(doubled)):.0f} ids {int(id_sum)}"
)

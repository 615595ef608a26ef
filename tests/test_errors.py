"""The texts that users of the original search for, with types that say whose mistake it is."""

import copy

import keras
import numpy as np
import pytest
import torch

import keras_distrib as kd
from keras_distrib.values import PerReplica


def two():
    return kd.MirroredStrategy(["cpu:0", "cpu:1"])


def values():
    return PerReplica([torch.tensor([1.0]), torch.tensor([2.0])])


def variable(strategy, **options):
    with strategy.scope():
        return keras.Variable(1.0, trainable=False, **options)


def model(compiled_in=None):
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    if compiled_in is not None:
        with compiled_in.scope():
            made.compile("sgd", "mse")
    return made


def nested_scopes():
    with two().scope(), two().scope():
        pass


def default_in_scope():
    default = kd.get_strategy()
    with two().scope(), default.scope():
        pass


def set_in_scope():
    with two().scope():
        kd.experimental_set_strategy(None)


def uneven_merges():
    def step():
        if kd.get_replica_context().replica_id_in_sync_group:
            kd.get_replica_context().merge_call(lambda strategy: None)

    two().run(step)


def stale_context():
    contexts = []
    two().run(lambda: contexts.append(kd.get_replica_context()))
    contexts[0].merge_call(lambda strategy: None)


def stale_context_across():
    strategy, contexts = two(), []
    strategy.run(lambda: contexts.append(kd.get_replica_context()))
    with strategy.scope():
        contexts[0].merge_call(lambda strategy: None)


def another_replicas_context():
    strategy, contexts = two(), []
    strategy.run(lambda: contexts.append(kd.get_replica_context()))
    strategy.run(lambda: contexts[0].merge_call(lambda strategy: None))


def next_in_a_replica():
    strategy = two()
    iterator = iter(strategy.experimental_distribute_dataset([torch.ones(2)]))
    strategy.run(lambda: next(iterator))


def apply_across():
    strategy = two()
    with strategy.scope():
        v, optimizer = keras.Variable(1.0), keras.optimizers.SGD()
        optimizer.apply_gradients([(torch.tensor(1.0), v)])


def fit_in_another_scope():
    strategy = two()
    with strategy.scope():
        made = model()
        made.compile("sgd", "mse")
    with kd.OneDeviceStrategy("cpu:0").scope():
        made.fit(np.ones((2, 1)), np.ones((2, 1)))


def metric_of_no_scope():
    metric = keras.metrics.MeanSquaredError()
    strategy = two()
    with strategy.scope():
        made = model()
        made.compile("sgd", "mse", metrics=[metric])


TEXTS = {
    "Mixing different tf.distribute.Strategy objects": (RuntimeError, nested_scopes),
    "Mixing different tf.distribute.Strategy objects:": (RuntimeError, fit_in_another_scope),
    "Must not nest tf.distribute.Strategy scopes.": (RuntimeError, default_in_scope),
    "Must not be called inside a `tf.distribute.Strategy` scope.": (RuntimeError, set_in_scope),
    "Method requires being in cross-replica context, use get_replica_context().merge_call()": (
        RuntimeError,
        lambda: two().run(lambda: kd.get_strategy().run(lambda: 1)),
    ),
    "use get_replica_context().all_gather() instead": (
        RuntimeError,
        lambda: two().run(lambda: kd.get_strategy().gather(torch.ones(1), axis=0)),
    ),
    "positional args must be a list or tuple": (ValueError, lambda: two().run(lambda x: x, args=1)),
    "Must only deepcopy DistributionStrategy.": (RuntimeError, lambda: copy.copy(two())),
    "Some replicas made a different number of replica_context().merge_call() calls.": (RuntimeError, uneven_merges),
    "Mismatching tf.distribute.Strategy objects": (RuntimeError, stale_context),
    "Need to be inside `call_for_each_replica()`": (RuntimeError, stale_context_across),
    "Mismatching ReplicaContext.": (RuntimeError, another_replicas_context),
    "'MAX' is not a valid ReduceOp": (ValueError, lambda: two().reduce("max", values(), axis=None)),
    "Expected `reduce_op` to be a `tf.distribute.ReduceOp`": (
        TypeError,
        lambda: two().reduce(None, values(), axis=None),
    ),
    "cannot be reduced with the given reduce op ReduceOp.SUM": (
        ValueError,
        lambda: two().reduce("sum", torch.tensor(3.0), axis=None),
    ),
    "Shape mismatch": (
        ValueError,
        lambda: two().gather(PerReplica([torch.ones(1, 2), torch.ones(1, 3)]), axis=0),
    ),
    "next(iterator) should be called from outside of replica_fn.": (ValueError, next_in_a_replica),
    "You are calling `compute_average_loss` in cross replica context": (
        RuntimeError,
        lambda: _in_scope(lambda: kd.compute_average_loss(torch.ones(2))),
    ),
    "You are calling `scale_regularization_loss` in cross replica context": (
        RuntimeError,
        lambda: _in_scope(lambda: kd.scale_regularization_loss(torch.tensor(1.0))),
    ),
    "Expected a tensor with at least rank 1.": (
        ValueError,
        lambda: kd.compute_average_loss(torch.tensor(1.0), global_batch_size=1),
    ),
    "cannot be called in cross-replica context": (RuntimeError, apply_across),
    "was not created in the distribution strategy scope of": (ValueError, lambda: model(compiled_in=two())),
    "All metrics must be created in": (ValueError, metric_of_no_scope),
    "creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype is not supported": (
        ValueError,
        lambda: _in_scope(lambda: keras.Variable(1, dtype="int32", trainable=False, aggregation="mean")),
    ),
    "`NONE` variable synchronization mode is not supported with tf.distribute strategy": (
        ValueError,
        lambda: variable(two(), synchronization="none"),
    ),
    "SyncOnReadVariable does not support `assign_add` in cross-replica context when aggregation is set to "
    "`tf.VariableAggregation.SUM`.": (
        ValueError,
        lambda: variable(two(), synchronization="on_read", aggregation="sum").assign_add(1.0),
    ),
    "Could not convert from `tf.VariableAggregation` VariableAggregationV2.NONE to`tf.distribute.ReduceOp` type": (
        ValueError,
        lambda: variable(two(), synchronization="on_read").numpy(),
    ),
    "You must specify an aggregation method to update a AggregatingVariable in Replica Context": (
        ValueError,
        lambda: _update_central(),
    ),
    "destinations can not be empty": (ValueError, lambda: kd.ReductionToOneDevice().reduce("sum", values(), "")),
    "`colocate_vars_with` must only be passed a variable created in this tf.distribute.Strategy.scope()": (
        ValueError,
        lambda: _colocate(),
    ),
    "worker_devices() method unsupported by default tf.distribute.Strategy.": (
        RuntimeError,
        lambda: kd.get_strategy().extended.worker_devices,
    ),
    "Call the `batch` method": (
        ValueError,
        lambda: next(iter(two().experimental_distribute_dataset([torch.tensor(1.0), torch.tensor(2.0)]))),
    ),
    "all_gather does not support IndexedSlices": (
        NotImplementedError,
        lambda: two().run(lambda: kd.get_replica_context().all_gather(torch.eye(2).to_sparse(), axis=0)),
    ),
    "Binding inputs to tf.function failed due to": (
        TypeError,
        lambda: kd.function(lambda x: x, input_signature=[kd.TensorSpec([1])])(torch.ones(2)),
    ),
    "End of sequence": (
        kd.errors.OutOfRangeError,
        lambda: iter(two().experimental_distribute_dataset([])).get_next(),
    ),
}


def _in_scope(fn):
    with two().scope():
        return fn()


def _colocate():
    strategy = two()
    with strategy.scope(), strategy.extended.colocate_vars_with(3):
        pass


def _update_central():
    strategy = kd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = keras.Variable(1.0)
    strategy.run(lambda: v.assign(torch.tensor(2.0)))


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_is_kept(text):
    kind, fail = TEXTS[text]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is checked below
        fail()
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert not kd.has_strategy()


@pytest.mark.parametrize("text", [t for t, (kind, _) in TEXTS.items() if kind is not kd.errors.OutOfRangeError])
def test_it_says_what_was_received_or_what_to_do(text):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        TEXTS[text][1]()
    message = str(caught.value)
    assert len(message) > len(text) + 15, "the original's text alone says too little"


def test_the_end_of_the_data(any_strategy):
    iterator = iter(any_strategy.experimental_distribute_dataset([torch.ones(2)]))
    iterator.get_next()
    for _ in range(2):
        with pytest.raises(kd.errors.OutOfRangeError):
            iterator.get_next()
        with pytest.raises(StopIteration):
            next(iterator)
    assert not issubclass(kd.errors.OutOfRangeError, StopIteration)

"""The rows of the parity table: kinds of models, losses, optimizers, metrics and batches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import torch
from keras import layers, losses, metrics, optimizers

RNG = np.random.default_rng(7)


@dataclass(frozen=True)
class Row:
    """A model, its data, and how they are trained."""

    name: str
    model: Callable[[], Any]
    data: Any
    batch_size: int = 8
    options: dict[str, Any] = field(default_factory=dict)


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def classes(rows, count=4):
    return RNG.integers(0, count, size=(rows,))


def crossentropy(**options):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def compiled(model, loss="mse", optimizer=None, metrics=None, **options):
    model.compile(optimizer or optimizers.SGD(0.05), loss, metrics=metrics, **options)
    return model


def dense(*hidden, inputs=(6,), outputs=4):
    """A stack of layers between an input and a dense output."""
    return keras.Sequential([layers.Input(inputs), *(make() for make in hidden), layers.Dense(outputs)])


def mlp(optimizer="adam", loss=None, metrics=("accuracy",), **options):
    def build():
        made = optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer()
        own = crossentropy() if loss is None else loss
        return compiled(dense(lambda: layers.Dense(16, "relu")), own, made, list(metrics), **options)

    return build


def optimizer(name, **options):
    return mlp(lambda: getattr(optimizers, name)(**{"learning_rate": 0.01, **options}))


X, Y, R = normal(30, 6), classes(30), normal(30, 4)
W = RNG.uniform(0, 2, size=(30,)).astype("float32")
SEQUENCES = RNG.integers(1, 9, size=(21, 5))
for _row in range(21):
    SEQUENCES[_row, RNG.integers(1, 6) :] = 0
STEPS = normal(21, 5, 3)


# Batches


BATCHES = [
    Row("batches that divide", mlp(), (X, Y), batch_size=10),
    Row("ragged last batch", mlp(), (X, Y), batch_size=8),
    Row("last batch of one row", mlp(), (X[:25], Y[:25]), batch_size=8),
    Row("fewer rows than replicas", mlp(), (X[:9], Y[:9]), batch_size=2),
    Row("batches of one row", mlp(), (X[:5], Y[:5]), batch_size=1),
    Row("validation split", mlp(), (X, Y), options={"validation_split": 0.3}),
    Row("float64 inputs", mlp(), (X.astype("float64"), Y)),
]


# Losses


def masked(loss=None, **compile_options):
    def build():
        model = keras.Sequential(
            [
                layers.Input((5,)),
                layers.Embedding(9, 6, mask_zero=True),
                layers.Dense(8, "tanh"),
                layers.Dense(9),
            ]
        )
        return compiled(model, loss or crossentropy(), optimizers.Adam(0.01), **compile_options)

    return build


def masking():
    model = keras.Sequential([layers.Input((5, 3)), layers.Masking(), layers.LSTM(4), layers.Dense(1)])
    return compiled(model, "mse", optimizers.Adam(0.01))


def two_outputs(**options):
    def build():
        inputs = layers.Input((6,))
        hidden = layers.Dense(8, "tanh")(inputs)
        model = keras.Model(inputs, [layers.Dense(4, name="a")(hidden), layers.Dense(1, name="b")(hidden)])
        made = optimizers.RMSprop(0.01)
        return compiled(model, [crossentropy(), "mse"], made, [["accuracy"], ["mae"]], **options)

    return build


class WithLosses(layers.Layer):
    """Adds a loss of its inputs and one of its weights."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x * self.scale)))
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(self.scale)))
        return x * self.scale


class ValidOnly(losses.Loss):
    """Returns one value per valid target, not per row."""

    def call(self, y_true, y_pred):
        return keras.ops.square(y_pred - y_true)[y_true > 0]


class RowMean(losses.Loss):
    """Returns a scalar: the mean over its rows."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_pred - y_true))


def per_pixel():
    model = keras.Sequential([layers.Input((6, 6, 2)), layers.Conv2D(4, 3, activation="relu"), layers.Conv2D(3, 1)])
    return compiled(model, crossentropy(), optimizers.Adam(0.01), ["accuracy"])


def regularized():
    model = dense(lambda: layers.Dense(8, "relu", kernel_regularizer="l2", activity_regularizer="l1"))
    model.layers[-1].bias_regularizer = keras.regularizers.L1(0.01)
    return compiled(model, metrics=["mae"])


def weighted(reduction):
    return mlp("sgd", crossentropy(reduction=reduction), weighted_metrics=["accuracy"])


LOSSES = [
    *(Row(f"reduction {name}", mlp("sgd", crossentropy(reduction=name)), (X, Y)) for name in ("sum", "mean")),
    *(
        Row(f"sample weights, {name}", weighted(name), (X, Y, W))
        for name in ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight")
    ),
    Row("weights of zero", weighted("mean_with_sample_weight"), (X, Y, np.where(np.arange(30) < 8, 0, W))),
    Row("weights per timestep", masked(), (SEQUENCES, SEQUENCES, RNG.uniform(0, 2, size=(21, 5)).astype("float32"))),
    Row("class weights", mlp(), (X, Y), options={"class_weight": {0: 1.0, 1: 3.0, 2: 0.5, 3: 2.0}}),
    Row("mask of an embedding", masked(metrics=["accuracy"]), (SEQUENCES, SEQUENCES)),
    Row("mask, mean_with_sample_weight", masked(crossentropy(reduction="mean_with_sample_weight")), (SEQUENCES,) * 2),
    Row("mask, sum", masked(crossentropy(reduction="sum")), (SEQUENCES, SEQUENCES)),
    Row("masking layer", masking, (np.where(SEQUENCES[..., None] > 0, STEPS, 0), normal(21, 1))),
    Row("two outputs, loss weights", two_outputs(loss_weights=[1.0, 0.3]), (X, [Y, R[:, :1]])),
    Row("two outputs, sample weights", two_outputs(), (X, [Y, R[:, :1]], [W, W[::-1].copy()])),
    Row("per pixel", per_pixel, (normal(18, 6, 6, 2), RNG.integers(0, 3, size=(18, 4, 4)))),
    Row("rank 3", lambda: compiled(dense(inputs=(5, 6))), (normal(18, 5, 6), normal(18, 5, 4))),
    Row("add_loss", lambda: compiled(dense(WithLosses)), (X, R)),
    Row("add_loss alone", lambda: compiled(keras.Sequential([dense(), WithLosses()]), loss=None), (X, R)),
    Row("regularizers", regularized, (X, R)),
    Row("a user's loss function", mlp("sgd", lambda y, p: keras.ops.mean(keras.ops.abs(y - p), -1), ("mae",)), (X, R)),
    Row("a user's loss of valid entries", mlp("sgd", ValidOnly(), ("mae",)), (X, R)),
    Row("a user's scalar loss", mlp("sgd", RowMean(), ("mae",)), (X, R)),
    Row("huber", mlp("sgd", "huber", ("mse",)), (X, R)),
    Row("cosine similarity", mlp("sgd", losses.CosineSimilarity(), ("cosine_similarity",)), (X, R)),
]


# Optimizers


def schedule():
    return optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, decay_steps=3, decay_rate=0.5))


def scaled():
    return optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=2.0**10, dynamic_growth_steps=3)


def frozen():
    model = dense(lambda: layers.Dense(8, "relu", trainable=False), lambda: layers.Dense(8, "tanh"))
    return compiled(model, "mse", optimizers.Adam(0.01))


def constrained():
    limit = keras.constraints.MaxNorm(0.5)
    model = dense(lambda: layers.Dense(8, "relu", kernel_constraint=limit), lambda: layers.UnitNormalization())
    return compiled(model, "mse", optimizers.SGD(0.2))


OPTIMIZERS = [
    *(Row(name, optimizer(name), (X, Y)) for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax")),
    *(Row(name, optimizer(name), (X, Y)) for name in ("Ftrl", "Lamb", "Lion", "Muon", "Nadam", "RMSprop", "SGD")),
    Row("ScheduleFreeAdamW", optimizer("ScheduleFreeAdamW"), (X, Y)),
    Row("SGD with momentum", optimizer("SGD", momentum=0.9, nesterov=True), (X, Y)),
    Row("global_clipnorm", optimizer("Adam", global_clipnorm=0.1), (X, Y)),
    Row("clipnorm and decay", optimizer("AdamW", clipnorm=0.1), (X, Y)),
    Row("clipvalue", optimizer("SGD", clipvalue=0.01), (X, Y)),
    Row("a schedule", mlp(schedule), (X, Y)),
    Row("EMA", optimizer("SGD", use_ema=True, ema_momentum=0.9), (X, Y)),
    Row("EMA with overwrite", optimizer("Adam", use_ema=True, ema_overwrite_frequency=2), (X, Y)),
    Row("gradient accumulation", optimizer("Adam", gradient_accumulation_steps=3, global_clipnorm=0.1), (X, Y)),
    Row("loss scaling", mlp(scaled), (X, Y)),
    Row("frozen layers", frozen, (X, R)),
    Row("constraints", constrained, (X, R)),
]


# Metrics


def measured(*chosen, loss="binary_crossentropy", outputs=1, activation="sigmoid", weighted=True):
    def build():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(outputs, activation)])
        again = [metric() for metric in chosen] if weighted else None
        return compiled(model, loss, optimizers.Adam(0.05), [metric() for metric in chosen], weighted_metrics=again)

    return build


class LargestError(metrics.Metric):
    """A user's metric: the mean over batches of rows of the largest error of each row."""

    def __init__(self, name="largest_error", **options):
        super().__init__(name=name, **options)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        worst = keras.ops.max(keras.ops.abs(keras.ops.cast(y_true, "float32") - y_pred), axis=-1)
        self.total.assign_add(keras.ops.sum(worst))
        self.rows.assign_add(float(worst.shape[0]))

    def result(self):
        return self.total / self.rows


BINARY = (X, (RNG.uniform(size=(30, 1)) > 0.5).astype("float32"), W)
ONE_HOT = (X, np.eye(4, dtype="float32")[Y], W)


def categorical(*chosen, weighted=True):
    return measured(*chosen, loss="categorical_crossentropy", outputs=4, activation="softmax", weighted=weighted)


METRICS = [
    Row("AUC", measured(metrics.AUC, lambda: metrics.AUC(curve="PR", name="pr")), BINARY),
    Row(
        "confusion counts",
        measured(metrics.TruePositives, metrics.TrueNegatives, metrics.FalsePositives, metrics.FalseNegatives),
        BINARY,
    ),
    Row("precision and recall", measured(metrics.Precision, metrics.Recall, metrics.BinaryAccuracy), BINARY),
    Row(
        "operating points",
        measured(lambda: metrics.PrecisionAtRecall(0.5), lambda: metrics.SensitivityAtSpecificity(0.5)),
        BINARY,
    ),
    Row("mean IoU", measured(lambda: metrics.BinaryIoU(target_class_ids=[0, 1]), weighted=False), BINARY),
    Row("F scores", categorical(lambda: metrics.F1Score("macro"), lambda: metrics.FBetaScore("weighted")), ONE_HOT),
    Row(
        "one-hot accuracy",
        categorical(metrics.CategoricalAccuracy, lambda: metrics.TopKCategoricalAccuracy(2)),
        ONE_HOT,
    ),
    Row("one-hot IoU", categorical(lambda: metrics.OneHotMeanIoU(4), weighted=False), ONE_HOT),
    Row("crossentropy as a metric", categorical(metrics.CategoricalCrossentropy), ONE_HOT),
    Row(
        "regression",
        measured(metrics.R2Score, metrics.RootMeanSquaredError, metrics.MeanAbsoluteError, loss="mse", activation=None),
        (X, R[:, :1], W),
    ),
    Row(
        "more regression",
        measured(metrics.LogCoshError, metrics.KLDivergence, metrics.CosineSimilarity, loss="mse"),
        (X, np.abs(R[:, :1]), W),
    ),
    Row("a user's metric", measured(LargestError, loss="mse", outputs=4, activation=None), (X, R)),
]


# Layers


def convnet():
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(2),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    return compiled(model, crossentropy(), optimizers.Adam(0.01), ["accuracy"])


class Attention(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(20, 6)
        self.attend = layers.MultiHeadAttention(2, 3)
        self.norm = layers.LayerNormalization()
        self.head = layers.Dense(4)

    def call(self, x):
        x = self.embed(x)
        return self.head(keras.ops.mean(self.norm(x + self.attend(x, x)), axis=1))


def synchronized(*shape, axis=-1):
    """Batch norm over all replicas; on one device Keras' own."""

    def build():
        made = layers.BatchNormalization(axis=axis, momentum=0.8, synchronized=True)
        model = keras.Sequential([layers.Input(shape), made, layers.Flatten(), layers.Dense(4)])
        return compiled(model, "mse", optimizers.SGD(0.05))

    return build


def synchronized_with_mask():
    model = keras.Sequential(
        [
            layers.Input((5,)),
            layers.Embedding(9, 3, mask_zero=True),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(9),
        ]
    )
    return compiled(model, crossentropy(), optimizers.SGD(0.05))


def adapted():
    normalization = layers.Normalization()
    normalization.adapt(X)
    model = keras.Sequential([layers.Input((6,)), normalization, layers.Dense(4)])
    return compiled(model)


class Torch(keras.Model):
    """A Keras model that holds torch modules."""

    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh())
        self.head = layers.Dense(4)

    def call(self, x):
        return self.head(self.hidden(x))


def torch_modules():
    model = Torch()
    model(X[:2])
    return compiled(model, "mse", optimizers.Adam(0.01))


def mixed(policy):
    def build():
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(16, "relu", dtype=policy), layers.Dense(4, dtype=policy)]
        )
        model.add(layers.Activation("linear", dtype="float32"))
        return compiled(model, "mse", optimizers.SGD(0.05))

    return build


def shared():
    layer = layers.Dense(6, "tanh")
    a, b = layers.Input((6,), name="a"), layers.Input((6,), name="b")
    model = keras.Model({"a": a, "b": b}, layers.Dense(1)(layers.concatenate([layer(a), layer(layer(b))])))
    return compiled(model, "mse", optimizers.Adam(0.01))


def stacked(*made, inputs=(5, 3), outputs=1):
    return lambda: compiled(dense(*made, inputs=inputs, outputs=outputs), "mse", optimizers.Adam(0.01))


def attention():
    return compiled(Attention(), crossentropy(), optimizers.Adam(0.01))


convolutional_lstm = stacked(lambda: layers.ConvLSTM1D(2, 2), layers.Flatten, inputs=(3, 4, 2))

LAYERS = [
    Row("convnet", convnet, (normal(22, 8, 8, 1), classes(22))),
    Row(
        "attention",
        lambda: compiled(Attention(), crossentropy(), optimizers.Adam(0.01)),
        (RNG.integers(0, 20, (21, 7)), classes(21)),
    ),
    Row("GRU", stacked(lambda: layers.GRU(4)), (STEPS, normal(21, 1))),
    Row("bidirectional LSTM", stacked(lambda: layers.Bidirectional(layers.LSTM(3))), (STEPS, normal(21, 1))),
    Row(
        "convolutional LSTM",
        stacked(lambda: layers.ConvLSTM1D(2, 2), layers.Flatten, inputs=(3, 4, 2)),
        (normal(11, 3, 4, 2), normal(11, 1)),
    ),
    Row("synchronized batch norm", synchronized(6), (X, R)),
    Row("synchronized batch norm, images", synchronized(3, 3, 2), (normal(19, 3, 3, 2), normal(19, 4))),
    Row("synchronized batch norm, channels first", synchronized(2, 4, axis=1), (normal(19, 2, 4), normal(19, 4))),
    Row("synchronized batch norm, mask", synchronized_with_mask, (SEQUENCES, SEQUENCES)),
    Row("group norm", lambda: compiled(dense(lambda: layers.GroupNormalization(2))), (X, R)),
    Row("RMS and unit norm", lambda: compiled(dense(layers.RMSNormalization, layers.UnitNormalization)), (X, R)),
    Row("spectral norm", lambda: compiled(dense(lambda: layers.SpectralNormalization(layers.Dense(6)))), (X, R)),
    Row("adapted normalization", adapted, (X, R)),
    Row("torch modules", torch_modules, (X, R)),
    Row("mixed_bfloat16", mixed("mixed_bfloat16"), (X, R)),
    Row("mixed_float16", mixed("mixed_float16"), (X, R)),
    Row("float64 layers", mixed("float64"), (X.astype("float64"), R)),
    Row("shared layers, dict inputs", shared, ({"a": X, "b": X[::-1].copy()}, R[:, :1])),
]

ROWS = BATCHES + LOSSES + OPTIMIZERS + METRICS + LAYERS

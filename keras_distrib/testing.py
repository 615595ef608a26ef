"""Checks that N replicas give the numbers of one device, for any model.

"Equal" cannot mean equal bits: on one device, adding a batch's gradients up in
another order changes single weights by 1e-3 after 30 steps of Adam. So a model
is measured against the noise that one device shows itself:

1. the summed gradients of the first step, per variable, differ by at most 1e-5
   of the model's largest gradient norm;
2. the logged loss of every batch differs by at most 1e-5, relatively;
3. final weights differ, per variable, by at most 10 times what one device
   differs from itself when each batch goes through the model in two parts, or
   by 1e-6 of the variable's norm (of 1, where that is less);
4. other logged metrics, `evaluate` and `predict` differ by at most 1e-5,
   relatively (of 1, where the values are less).

Where a layer computes in half precision, gradients, losses and metrics may also
differ by 10 times what one device differs from itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import keras
import numpy as np
import torch

from keras_distrib import keras_seam
from keras_distrib.strategies.mirrored import MirroredStrategy
from keras_distrib.strategy import Strategy
from keras_distrib.values import map_structure

GRADIENT_TOLERANCE = 1e-5
LOSS_TOLERANCE = 1e-5
METRIC_TOLERANCE = 1e-5
NOISE_FACTOR = 10.0
NOISE_FLOOR = 1e-6

Arrays = dict[str, np.ndarray]
Logs = dict[str, float]


@dataclass
class Training:
    """What one training run left to compare.

    Attributes:
        gradients: summed gradients of the first step, by variable path.
        batch_logs: the logs of every batch, in order.
        weights: all weights after training, by variable path.
        evaluated: what `evaluate` returned.
        predicted: what `predict` returned, flattened to a list of arrays.
        half_precision: whether a layer computes in float16 or bfloat16.
    """

    gradients: Arrays
    batch_logs: list[dict[str, float]]
    weights: Arrays
    evaluated: dict[str, float]
    predicted: list[np.ndarray]
    half_precision: bool


@dataclass
class Report:
    """The worst figures of one comparison; each is at most 1 if all is well.

    Attributes:
        replicas: how many replicas were compared with one device.
        figures: by measure, the worst difference as a part of what is allowed.
        where: by measure, the variable, layer or batch that differed most.
        measured: by measure, the worst difference itself.
    """

    replicas: int
    figures: dict[str, float] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)

    def note(self, measure: str, difference: float, allowed: float, where: str) -> None:
        """Keeps a difference if it is the measure's worst so far."""
        figure = difference / allowed if np.isfinite(difference) else float("inf")
        if figure >= self.figures.get(measure, -1.0):
            self.figures[measure] = figure
            self.where[measure] = where
            self.measured[measure] = difference

    @property
    def worst(self) -> float:
        return max(self.figures.values())

    def __str__(self) -> str:
        lines = [
            f"  {measure}: {self.measured[measure]:.2e} ({figure:.2g} of what is allowed) in {self.where[measure]}"
            for measure, figure in self.figures.items()
        ]
        return "\n".join([f"{self.replicas} replicas against one device:", *lines])


def assert_replicas_agree(
    model_fn: Callable[[], Any],
    data: Any,
    replicas: Sequence[int] = (2, 3),
    *,
    batch_size: int = 32,
    epochs: int = 2,
    seed: int = 0,
    strategy_fn: Callable[[list[str]], Strategy] = MirroredStrategy,
    synchronized: bool = True,
    **fit_arguments: Any,
) -> list[Report]:
    """Trains a model on one device and on replicas, and compares the numbers.

    The devices are logical CPUs: split the CPU first with
    `keras_distrib.config.set_logical_device_configuration`.

    Args:
        model_fn: makes and compiles the model; called with the same seed each
            time, in a strategy's scope or outside of one.
        data: `(x, y)` or `(x, y, sample_weight)` of arrays, or nested structures
            of arrays, with the rows in axis 0.
        replicas: the numbers of replicas to compare.
        batch_size: rows of the global batch.
        epochs: how long to train.
        seed: for initial weights.
        strategy_fn: makes the strategy from a list of device names.
        synchronized: False leaves out what only one device can do exactly:
            outputs and state that depend on a replica's own batch statistics.
        **fit_arguments: further arguments of `Model.fit`, such as `class_weight`.

    Returns:
        One `Report` for each number of replicas.

    Raises:
        AssertionError: with the report, if they differ by more than the noise
            that this module's docstring allows.

    Example:

    ```python
    def model_fn():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    keras_distrib.testing.assert_replicas_agree(model_fn, (x, y), replicas=(2, 3))
    ```
    """
    options = {"batch_size": batch_size, "epochs": epochs, "seed": seed, **fit_arguments}
    reference = train(model_fn, data, None, **options)
    noisy = train(model_fn, data, None, in_two_parts=True, **options)
    reports = []
    for count in replicas:
        strategy = strategy_fn([f"cpu:{index}" for index in range(count)])
        found = train(model_fn, data, strategy, **options)
        report = compare(reference, noisy, found, count, synchronized=synchronized)
        if report.worst > 1.0:
            raise AssertionError(str(report))
        reports.append(report)
    return reports


def train(
    model_fn: Callable[[], Any],
    data: Any,
    strategy: Strategy | None,
    *,
    batch_size: int,
    epochs: int,
    seed: int,
    in_two_parts: bool = False,
    **fit_arguments: Any,
) -> Training:
    """Trains a model and keeps what is compared.

    Args:
        model_fn: see `assert_replicas_agree`.
        data: see there.
        strategy: the strategy to make the model under, or None for plain Keras.
        batch_size: rows of the global batch.
        epochs: how long to train.
        seed: for initial weights.
        in_two_parts: whether each batch goes through the model in two parts.
        **fit_arguments: further arguments of `Model.fit`.
    """
    x, y, sample_weight = (*data, None)[:3]
    keras.utils.set_random_seed(seed)
    if strategy is None:
        model = model_fn()
    else:
        with strategy.scope():
            model = model_fn()
    if in_two_parts:
        model.train_step = MethodType(_train_step_in_two_parts, model)
    logs = _BatchLogs()
    gradients = _record_gradients(model)
    model.fit(
        x,
        y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[logs],
        **fit_arguments,
    )
    evaluated = model.evaluate(x, y, sample_weight=sample_weight, batch_size=batch_size, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=batch_size, verbose=0)
    return Training(
        gradients=gradients,
        batch_logs=logs.batches,
        weights=_by_path(model.weights),
        evaluated=evaluated,
        predicted=[np.asarray(leaf) for leaf in keras.tree.flatten(predicted)],
        half_precision=any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers()),
    )


def compare(
    reference: Training, noisy: Training, found: Training, replicas: int, *, synchronized: bool = True
) -> Report:
    """Measures a run on replicas against one device's, as this module says.

    Args:
        reference: one device's run.
        noisy: the same, with each batch in two parts.
        found: the run on replicas.
        replicas: how many.
        synchronized: see `assert_replicas_agree`.
    """
    report = Report(replicas)
    # Where layers compute in half precision, gradients and losses are as noisy as weights.
    factor = NOISE_FACTOR if reference.half_precision else 0.0
    _compare_gradients(report, reference, noisy, found, factor)
    noise = factor * _log_noise(reference, noisy)
    for step, (own, other) in enumerate(zip(reference.batch_logs, found.batch_logs, strict=True)):
        _compare_logs(report, own, other, f"batch {step}", noise)
    weights = zip(reference.weights.items(), noisy.weights.values(), found.weights.values(), strict=True)
    for (path, weight), again, other in weights:
        norm = max(1.0, float(np.linalg.norm(weight)))
        allowed = max(NOISE_FACTOR * _distance(again, weight), NOISE_FLOOR * norm)
        report.note("weights", _distance(other, weight), allowed, path)
    if synchronized:
        _compare_logs(report, reference.evaluated, found.evaluated, "evaluate", noise)
        _compare_predictions(report, reference, noisy, found)
    return report


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one.astype("float64") - other.astype("float64")))


def _compare_gradients(report: Report, reference: Training, noisy: Training, found: Training, factor: float) -> None:
    largest = max((float(np.linalg.norm(gradient)) for gradient in reference.gradients.values()), default=1.0)
    largest = max(largest, 1e-12)
    # By position: Keras numbers the names of layers that are made again.
    triples = zip(reference.gradients.items(), noisy.gradients.values(), found.gradients.values(), strict=True)
    for (path, gradient), again, other in triples:
        noise = factor * _distance(again, gradient) / largest
        report.note("gradients", _distance(other, gradient) / largest, max(GRADIENT_TOLERANCE, noise), path)


def _compare_predictions(report: Report, reference: Training, noisy: Training, found: Training) -> None:
    triples = zip(reference.predicted, noisy.predicted, found.predicted, strict=True)
    for output, (own, again, other) in enumerate(triples):
        if own.shape != other.shape:
            report.note("predictions", float("inf"), 1.0, f"output {output}: shape {other.shape}, not {own.shape}")
            continue
        spread = max(1.0, float(np.abs(own).max(initial=0.0)))
        noise = float(np.abs(again.astype("float64") - own).max(initial=0.0))
        difference = float(np.abs(other.astype("float64") - own).max(initial=0.0))
        report.note("predictions", difference, max(NOISE_FACTOR * noise, METRIC_TOLERANCE * spread), f"output {output}")


def _relative(name: str, value: float, other: float) -> float:
    """The difference of a logged value, of its size."""
    return abs(other - value) / max(abs(value), 1e-3 if _is_loss(name) else 1.0)


def _is_loss(name: str) -> bool:
    return name == "loss" or name.endswith("_loss")


def _log_noise(reference: Training, noisy: Training) -> float:
    """How much one device's logs differ from its own, at most."""
    batches = zip(reference.batch_logs, noisy.batch_logs, strict=True)
    logs = (zip(own.items(), again.values(), strict=True) for own, again in batches)
    return max((_relative(name, value, again) for pairs in logs for (name, value), again in pairs), default=0.0)


def _compare_logs(report: Report, own: Logs, other: Logs, where: str, noise: float) -> None:
    if len(own) != len(other):
        report.note("metrics", float("inf"), 1.0, f"{where}: logs {list(other)}, not {list(own)}")
        return
    # By position: Keras numbers the names of metrics that are made again.
    for (name, value), found in zip(own.items(), other.values(), strict=True):
        measure, tolerance = ("losses", LOSS_TOLERANCE) if _is_loss(name) else ("metrics", METRIC_TOLERANCE)
        report.note(measure, _relative(name, value, found), max(tolerance, noise), f"{name} of {where}")


class _BatchLogs(keras.callbacks.Callback):
    """Keeps the logs of every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.batches.append({name: float(value) for name, value in (logs or {}).items()})


def _by_path(variables: Sequence[Any]) -> Arrays:
    return {f"{index}:{variable.path}": variable.numpy() for index, variable in enumerate(variables)}


def _record_gradients(model: Any) -> Arrays:
    """Keeps the gradients of the optimizer's first update, summed by then and not yet clipped."""
    recorded: Arrays = {}
    paths: list[str] = []
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    original_apply, original_clip = optimizer._backend_apply_gradients, optimizer._clip_gradients

    def apply(gradients: Sequence[torch.Tensor], variables: Sequence[Any]) -> None:
        paths[:] = [f"{index}:{variable.path}" for index, variable in enumerate(variables)]
        original_apply(gradients, variables)

    def clip(gradients: Sequence[torch.Tensor]) -> Any:
        if not recorded:
            pairs = zip(paths, gradients, strict=True)
            recorded.update({path: keras_seam.to_numpy(gradient).copy() for path, gradient in pairs})
        return original_clip(gradients)

    optimizer._backend_apply_gradients, optimizer._clip_gradients = apply, clip
    return recorded


def _train_step_in_two_parts(model: Any, data: Any) -> dict[str, Any]:
    """Keras' step, but for the forward pass: two parts of the rows, one after the other."""
    x, y, sample_weight = keras_seam.unpack_x_y_sample_weight(data)
    rows = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None).shape[0]
    first = max(1, rows * 7 // 10)
    parts = [slice(0, first), slice(first, rows)] if first < rows else [slice(0, rows)]
    outputs = [model(map_structure(lambda leaf, rows=rows: leaf[rows], x), training=True) for rows in parts]
    y_pred = keras.tree.map_structure(_concatenated, *outputs)
    model.zero_grad()
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    model._loss_tracker.update_state(loss.detach(), sample_weight=rows)
    model.optimizer.scale_loss(loss).backward()
    variables = model.trainable_weights
    with torch.no_grad():
        model.optimizer.apply([variable.value.grad for variable in variables], variables)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _concatenated(*outputs: torch.Tensor) -> torch.Tensor:
    joined = torch.cat(outputs)
    masks = [getattr(output, "_keras_mask", None) for output in outputs]
    if all(mask is not None for mask in masks):
        joined._keras_mask = torch.cat(masks)  # type: ignore[arg-type, attr-defined]
    return joined

"""The trainer in front of Keras' own: `fit`, `evaluate` and `predict` on replicas.

A model made in a strategy's scope trains through that strategy; for any other
model every method here hands straight to Keras'. One replica step is forward, a
loss over its true denominator, gradients, and the optimizer's `apply`, which
sums them; metric state is each replica's own and is added up when read.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch

from keras_distrib import context, keras_seam
from keras_distrib.capture.steps import CapturedStep
from keras_distrib.capture.trace import in_graph_or_eager
from keras_distrib.data.split import SplitBatch, count_rows, split_batch
from keras_distrib.replicas.state import current_state
from keras_distrib.strategy import Strategy
from keras_distrib.training import inputs, ownership
from keras_distrib.values import PerReplica, map_structure, select

Logs = dict[str, Any]


class DistributedTrainer(keras_seam.Trainer):
    """Keras' trainer, on the replicas of the strategy that the model belongs to."""

    _distribute_strategy: Strategy | None = None
    _capture: Any = "auto"  # `jit_compile` as the user gave it
    _announcing = False
    _shows_progress = False

    def __init__(self) -> None:
        super().__init__()
        strategy = context.get_strategy() if context.has_strategy() else None
        # Not through Keras' attribute tracking, which has not begun yet.
        object.__setattr__(self, "_distribute_strategy", strategy)
        object.__setattr__(self, "_announcing", False)
        object.__setattr__(self, "_shows_progress", False)
        object.__setattr__(self, "_capture", "auto")

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy in whose scope the model was created."""
        return self._distribute_strategy or context.get_strategy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # As Keras copies a model, by saving and loading it, but in the model's scope.
        strategy = self._distribute_strategy
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            return copy._reconstruct(self, memo, *self.__reduce_ex__(4))  # pyright: ignore[reportAttributeAccessIssue]

    # One replica's step.

    def train_step(self, data: Any) -> Logs:
        if _replica_step_of(self) is None:
            return super().train_step(data)
        return self.compute_metrics(*self._forward_backward(data))

    def test_step(self, data: Any) -> Logs:
        if _replica_step_of(self) is None:
            return super().test_step(data)
        return self.compute_metrics(*self._forward(data, training=False)[0])

    def _forward(self, data: Any, training: bool) -> tuple[tuple[Any, Any, Any, Any], Any]:
        x, y, sample_weight = keras_seam.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=training) if self._call_has_training_arg else self(x)
        loss = self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        rows = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None).shape[0]
        self._loss_tracker.update_state(loss.detach(), sample_weight=rows)
        return (x, y, y_pred, sample_weight), loss

    def _forward_backward(self, data: Any) -> tuple[Any, Any, Any, Any]:
        results, loss = self._forward(data, training=True)
        variables = self.trainable_variables
        optimizer: Any = self.optimizer
        if optimizer is None or not variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return results
        gradients = _gradients(optimizer.scale_loss(loss), [variable.value for variable in variables])
        optimizer.apply(gradients, variables)
        return results

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        # Keras sums what `add_loss` was given, so that a tensor of rows is a sum over rows.
        state = current_state()
        total = super()._aggregate_additional_loss(loss)
        return total / state.share if state is not None and state.averages_gradients and loss.ndim else total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients; in a replica's step, of that replica's tensors."""
        state = current_state()
        if state is None:
            super().zero_grad(set_to_none)
            return
        for variable in self.trainable_variables:
            variable.value.grad = None

    # The functions that `fit`, `evaluate` and `predict` call with each batch.

    def make_train_function(self, force: bool = False) -> Any:
        if self._distribute_strategy is None:
            return super().make_train_function(force)
        if self.train_function is None or force:
            step = self._without_logs(self._forward_backward) if self._is_plain("train_step") else self.train_step
            self.train_function = self._function(step, self._combined_logs)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        if self._distribute_strategy is None:
            return super().make_test_function(force)
        if self.test_function is None or force:
            step = self.test_step
            if self._is_plain("test_step"):
                step = self._without_logs(lambda data: self._forward(data, training=False)[0])
            self.test_function = torch.no_grad()(self._function(step, self._combined_logs))
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        if self._distribute_strategy is None:
            return super().make_predict_function(force)
        if self.predict_function is None or force:
            self.predict_function = torch.no_grad()(self._function(self.predict_step, self._joined_outputs))
        return self.predict_function

    def _is_plain(self, step: str) -> bool:
        """Whether neither the step nor `compute_metrics` is the user's own."""
        own = getattr(getattr(self, step), "__func__", None)
        metrics = getattr(self.compute_metrics, "__func__", None)
        return own is getattr(DistributedTrainer, step) and metrics is keras_seam.BaseTrainer.compute_metrics

    def _without_logs(self, step: Callable[[Any], tuple[Any, Any, Any, Any]]) -> Callable[[Any], None]:
        """A step that leaves the metrics' results, which are global, to be read once."""

        def update(results: list[Any]) -> None:
            metrics: Any = self._compile_metrics
            metrics.update_state(*results)

        def run(data: Any) -> None:
            _, *results = step(data)
            if self._compile_metrics is not None:
                with torch.no_grad():
                    in_graph_or_eager("metrics", results, update)

        return run

    def _function(self, step: Callable[[Any], Any], combine: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
        strategy = self.distribute_strategy

        def replica_step(data: Any) -> Any:
            state = current_state()
            if state is not None:
                state.averages_gradients = True
            return step(data)

        run: Callable[[Any], Any] = functools.partial(self._run, replica_step)
        if self._capture and not self.run_eagerly:
            name, compiles = f"A step of model {self.name!r}", self._capture is True
            captured = CapturedStep(strategy, replica_step, name, compiles, self._compiling)
            run = functools.partial(self._run_captured, captured)

        def function(data: list[Any]) -> Any:
            results = []
            for batch in data:
                split = isinstance(batch, SplitBatch)
                parts, rows = (batch.parts, batch.rows) if split else split_batch(batch, strategy.devices)
                self._announce(rows)
                if not rows and combine == self._joined_outputs:
                    results.append(step(select(0, parts)))  # nothing to run, but outputs have shapes
                else:
                    results.append(combine(run(parts)))
            if len(results) == 1 or combine == self._combined_logs:
                return results[-1]
            return keras.tree.map_structure(lambda *parts: torch.cat(parts), *results)

        return function

    def _run(self, step: Callable[[Any], Any], parts: Any) -> Any:
        return self.distribute_strategy.run(step, args=(parts,))

    def _run_captured(self, step: CapturedStep, parts: Any) -> Any:
        context.require_cross_replica(self.distribute_strategy)
        return step((parts,), {})

    def _combined_logs(self, result: Any) -> Logs:
        """The logs of one step: metrics' global results, and what else the step returned."""
        return self.get_metrics_result() if result is None else map_structure(_global_value, result)

    def _joined_outputs(self, result: Any) -> Any:
        """The outputs of all rows, in order; of what has no row per input row, the first replica's."""
        strategy = self.distribute_strategy

        def join(leaf: Any) -> Any:
            if not isinstance(leaf, PerReplica) or leaf.rows is None:
                return leaf
            lengths = [value.shape[0] if value.ndim else None for value in leaf.active_values]
            by_rows = lengths == [rows for rows in leaf.rows if rows]
            return strategy.gather(leaf, axis=0) if by_rows else leaf.active_values[0]

        return map_structure(join, result)

    # Keras' entry points.

    @functools.wraps(keras_seam.Trainer.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_strategy("fit"):
            verbose = _argument(keras_seam.Trainer.fit, "verbose", self, *args, **kwargs)
            object.__setattr__(self, "_announcing", verbose in ("auto", 1, 2))
            with self._showing(verbose):
                return super().fit(*args, **kwargs)

    @functools.wraps(keras_seam.Trainer.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        verbose = _argument(keras_seam.Trainer.evaluate, "verbose", self, *args, **kwargs)
        with self._on_strategy("evaluate", synchronized=True), self._showing(verbose):
            return super().evaluate(*args, **kwargs)

    @functools.wraps(keras_seam.Trainer.predict)
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        verbose = _argument(keras_seam.Trainer.predict, "verbose", self, *args, **kwargs)
        with self._on_strategy("predict", synchronized=True), self._showing(verbose):
            return super().predict(*args, **kwargs)

    @functools.wraps(keras_seam.Trainer.train_on_batch)
    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_strategy("train_on_batch"):
            return super().train_on_batch(*args, **kwargs)

    @functools.wraps(keras_seam.Trainer.test_on_batch)
    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_strategy("test_on_batch", synchronized=True):
            return super().test_on_batch(*args, **kwargs)

    @functools.wraps(keras_seam.Trainer.predict_on_batch)
    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_strategy("predict_on_batch", synchronized=True):
            return super().predict_on_batch(*args, **kwargs)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        adapter = getattr(iterator, "data_adapter", None)
        if data_batch is None and isinstance(adapter, inputs.InputAdapter):
            data_batch = adapter.first()
        if self._distribute_strategy is None:
            super()._symbolic_build(iterator, data_batch)
            return
        if data_batch is not None:
            data_batch = keras.tree.map_structure(_as_tensor, data_batch)
            count_rows(data_batch)
        with self._distribute_strategy.scope():
            super()._symbolic_build(iterator, data_batch)
        ownership.check_model(self, self._distribute_strategy)
        self._announce(getattr(getattr(iterator, "data_adapter", None), "batch_size", None))

    def get_metrics_result(self) -> Logs:
        # Keras 3.16 sums metric variables over processes itself; a strategy has done so.
        if self._distribute_strategy is None:
            return super().get_metrics_result()
        return keras_seam.BaseTrainer.get_metrics_result(self)

    @contextlib.contextmanager
    def _on_strategy(self, method: str, synchronized: bool = False) -> Iterator[None]:
        """A call on a model, after a check that its strategy owns it and may run.

        `synchronized` gives every replica the state that reading the model gives, so
        that all of them evaluate with the same.
        """
        strategy = self._distribute_strategy
        if strategy is None:
            if context.has_strategy():
                ownership.refuse_model(self, context.get_strategy(), method)
            with inputs.reading_for(None):
                yield
            return
        # Not in its scope: callbacks may train and make models that are none of its.
        context.require_cross_replica(strategy)
        ownership.check_model(self, strategy)
        if synchronized:
            synchronize(self)
        with inputs.reading_for(strategy):
            yield

    @contextlib.contextmanager
    def _showing(self, verbose: Any) -> Iterator[None]:
        """Whether a progress line is shown."""
        outer = self._shows_progress
        object.__setattr__(self, "_shows_progress", verbose in ("auto", 1))
        try:
            yield
        finally:
            object.__setattr__(self, "_shows_progress", outer)

    def _compiling(self) -> contextlib.AbstractContextManager[None]:
        """While a step is captured, the progress line says so."""
        return keras_seam.passing_message(" compiling…") if self._shows_progress else contextlib.nullcontext()

    def _announce(self, batch_size: int | None) -> None:
        strategy = self._distribute_strategy
        if not self._announcing or strategy is None or batch_size is None:
            return
        object.__setattr__(self, "_announcing", False)
        replicas = strategy.num_replicas_in_sync
        devices = ", ".join(str(device) for device in strategy.devices)
        per_replica = -(-batch_size // replicas)
        keras_seam.print_message(
            f"{type(strategy).__name__}: {replicas} replica{'s' if replicas > 1 else ''} ({devices}), "
            f"global batch {batch_size}, per replica {per_replica}"
        )


def _argument(function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """What a call gives as an argument, which is "auto" by default."""
    return inspect.signature(function).bind(*args, **kwargs).arguments.get(name, "auto")


def synchronize(model: Any) -> None:
    """Gives every replica the state that reading a model's variables gives."""
    for variable in model.non_trainable_variables:
        variable.synchronize()


def compile_model(model: Any, original: Callable[..., None], kwargs: dict[str, Any]) -> None:
    """Stands in for `Trainer.compile`: in the model's scope, with checks."""
    strategy = model._distribute_strategy
    if strategy is None:
        if context.has_strategy():
            ownership.refuse_model(model, context.get_strategy(), "compile")
        original(**kwargs)
        return
    arguments = inspect.signature(original).bind(**kwargs).arguments
    object.__setattr__(model, "_capture", arguments.get("jit_compile", "auto"))
    with strategy.scope():
        original(**kwargs)
        ownership.check_model(model, strategy)


def _replica_step_of(model: Any) -> Any:
    """The replica's state if the calling thread runs a step of this model's strategy."""
    return current_state() if model._distribute_strategy is not None else None


def _gradients(loss: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    positions = [position for position, tensor in enumerate(tensors) if tensor.requires_grad]
    gradients: list[torch.Tensor | None] = [None] * len(tensors)
    if loss.requires_grad and positions:
        found = torch.autograd.grad(loss, [tensors[position] for position in positions], allow_unused=True)
        for position, gradient in zip(positions, found, strict=True):
            gradients[position] = gradient
    return gradients


def _global_value(value: Any) -> Any:
    """What one device would have returned.

    A metric's result is the global one; of several rows, one after the other, each
    replica's; of a scalar the mean over rows.
    """
    first = value.active_values[0] if isinstance(value, PerReplica) else value
    metric = getattr(first, "_keras_distrib_metric", None)
    if metric is not None:
        return metric.result()
    if not isinstance(value, PerReplica):
        return value
    rows = value.rows or [1] * len(value.values)
    if isinstance(first, torch.Tensor) and [part.shape[:1] for part in value.active_values] == [
        (count,) for count in rows if count
    ]:
        return torch.cat(value.active_values)
    total = sum(rows)
    parts = [
        keras_seam.convert_to_tensor(part) * (count / total)
        for part, count in zip(value.values, rows, strict=True)
        if count
    ]
    return sum(parts[1:], parts[0])


def _as_tensor(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, torch.Tensor) else keras_seam.convert_to_tensor(leaf)

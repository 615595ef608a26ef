"""Refuses models, optimizers and metrics that another scope made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import keras

from keras_distrib.strategy import Strategy

_MOVE = "Create the model, its optimizer and its metrics inside the same `with strategy.scope():`."


def check_model(model: Any, strategy: Strategy) -> None:
    """Raises unless all the model's variables belong to its strategy.

    Raises:
        ValueError: naming the first variable, optimizer or metric that does not.
    """
    for variable in model.variables:
        if _owner(variable) is not strategy:
            raise ValueError(
                f"Variable ({variable.path}) was not created in the distribution strategy scope of {strategy!r}. "
                f"Received: model {model.name!r} of {strategy!r} with a variable of {_named(_owner(variable))}. "
                f"Move the layer's creation. {_MOVE}"
            )
    if not model.compiled:
        return
    for kind, owner_object in _compiled_parts(model):
        for variable in owner_object.variables:
            if _owner(variable) is not strategy:
                raise ValueError(
                    f"All {kind}s must be created in the scope of the model's strategy. Variable ({variable.path}) "
                    f"was not created in the distribution strategy scope of {strategy!r}. "
                    f"Received: {kind} {owner_object.name!r} of {_named(_owner(variable))}, model {model.name!r} of "
                    f"{strategy!r}. Move the {kind}'s creation. {_MOVE}"
                )


def refuse_model(model: Any, strategy: Strategy, method: str) -> NoReturn:
    """Raises for a model of no strategy that is used in a strategy's scope."""
    raise ValueError(
        f"Model {model.name!r} was not created in the distribution strategy scope of {strategy!r}, but `{method}` was "
        f"called in it. Received: a model of no strategy. Move the model's creation. {_MOVE}"
    )


def _compiled_parts(model: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(model.optimizer, keras.optimizers.Optimizer):
        yield "optimizer", model.optimizer
    for metric in model.metrics:
        yield "metric", metric
    compiled = model._compile_metrics
    if compiled is not None:
        for metric in keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics]):
            if isinstance(metric, keras.metrics.Metric):
                yield "metric", metric


def _owner(variable: Any) -> Any:
    return getattr(variable, "strategy", None)


def _named(owner: Any) -> str:
    return "no strategy" if owner is None else repr(owner)

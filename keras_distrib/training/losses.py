"""Losses of a replica's rows that together are the loss of the whole batch.

A mean over a batch is (sum over rows) / (rows of the whole batch). A replica's
*part* of it is its own sum over the global denominator: the parts, and so their
gradients, add up to the one-device value. Where the denominator is not the
number of rows (valid entries of a mask, a sum of weights, what a user's loss
returns), the replicas add up theirs, once per loss.

In a loop of one's own a `Loss` object returns the part, and gradients are summed.
In `Model.fit` it returns part / share, for an unmasked mean the mean over the
replica's own rows, and gradients are averaged by the shares: a step that is
written as for one device is then right as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_distrib import context, keras_seam
from keras_distrib.comm.collectives import reduce_lists
from keras_distrib.options import ReduceOp
from keras_distrib.replicas.replica_context import ReplicaContext
from keras_distrib.replicas.state import current_state

ops = keras_seam.ops

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def call_loss(loss: Any, original: Callable[..., Any], y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Stands in for a `Loss` object's call.

    Losses that compare rows with one another are computed on all replicas' rows,
    gathered; for all others it is noted whether the loss is Keras' own.
    """
    state, replica = current_state(), context.running_replica()
    if state is None or replica is None or state.num_active == 1:
        return original(y_true, y_pred, sample_weight)
    if keras_seam.compares_rows(loss) and state.is_counted and not keras_seam.has_mask(y_pred):
        given = [y_true, y_pred] if sample_weight is None else [y_true, y_pred, sample_weight]
        gathered = replica.all_gather([ops.convert_to_tensor(value) for value in given], axis=0)
        with state.taking(loss_is_global=True):
            value = original(*gathered)
        return value if state.averages_gradients else value / state.num_active
    with state.taking(loss_is_builtin=keras_seam.is_builtin_loss(loss)):
        return original(y_true, y_pred, sample_weight)


def reduce_weighted_values(values: Any, sample_weight: Any, mask: Any, reduction: Any, dtype: Any) -> Any:
    """Stands in for Keras' function of that name; in a replica's step the mean is global.

    Args:
        values: loss values, of shape (rows, ...), or a scalar.
        sample_weight: weights that broadcast to `values`, or None.
        mask: True where a value counts, or None.
        reduction: a Keras reduction name.
        dtype: what to compute in.

    Returns:
        This replica's part of what one device returns, or part / share; see the
        module's docstring.
    """

    def keras_own() -> Any:
        return keras_seam.original_reduce_weighted_values(
            values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype
        )

    state, replica = current_state(), context.running_replica()
    if state is None or replica is None or state.num_active == 1 or state.loss_is_global:
        return keras_own()
    if reduction not in _MEANS:
        summed = reduction == "sum" and state.averages_gradients
        return keras_own() / state.share if summed else keras_own()
    values = ops.convert_to_tensor(values, dtype=dtype)
    by_rows = mask is None and (sample_weight is None or reduction != "mean_with_sample_weight")
    by_rows = by_rows and state.loss_is_builtin and values.shape[:1] == (state.rows,)
    if values.ndim == 0 or not state.is_counted or by_rows:
        return keras_own() if state.averages_gradients else keras_own() * state.share
    part = _part_of_mean(replica, values, sample_weight, mask, reduction, dtype)
    return part / state.share if state.averages_gradients else part


def _part_of_mean(
    replica: ReplicaContext, values: torch.Tensor, sample_weight: Any, mask: Any, reduction: str, dtype: Any
) -> torch.Tensor:
    if sample_weight is not None:
        # A copy, since `apply_mask` writes into it.
        sample_weight = keras_seam.convert_to_tensor(sample_weight, dtype=dtype).clone()
    if mask is not None:
        mask = ops.convert_to_tensor(mask, dtype=dtype)
    weights = keras_seam.apply_mask(sample_weight, mask, dtype=values.dtype, reduction="sum")
    count = float(math.prod(values.shape))
    if weights is not None:
        weights = ops.cast(weights, values.dtype)
        values, weights = keras_seam.squeeze_or_expand_to_same_rank(values, weights)
        values = values * weights
    weight_sum = count if weights is None else weights.sum().double()
    valid = 1.0 if mask is None else mask.sum().double()
    entries = 1.0 if mask is None else float(math.prod(mask.shape))
    counts, weight_sums, valids, all_entries = _add_up(replica, (count, weight_sum, valid, entries), values)
    total = values.sum()
    if reduction == "mean_with_sample_weight":
        return ops.divide_no_nan(total, weight_sums)
    if mask is not None:  # Keras gives valid entries the weight entries / valid
        total = total * ops.divide_no_nan(all_entries, valids)
    return ops.divide_no_nan(total, counts)


def _add_up(replica: ReplicaContext, numbers: Sequence[Any], like: torch.Tensor) -> list[torch.Tensor]:
    """Adds up each number over the replicas, as scalars like `like`."""

    def act(lists: list[list[Any]]) -> list[list[torch.Tensor]]:
        return reduce_lists(ReduceOp.SUM, lists)

    own = [n.detach().cpu() if isinstance(n, torch.Tensor) else torch.tensor(n, dtype=torch.float64) for n in numbers]
    totals = replica.meet("the denominator of a loss", own, act, lambda mine: [torch.empty_like(n) for n in mine])
    return [total.to(like.device, like.dtype) for total in totals]


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
    """Divides per-example losses by the global batch size.

    In a replica's step the results' sum over replicas is the global mean if
    `global_batch_size` is the whole batch's. Without it, it is taken to be
    local rows times replicas, as in the original: that is the true mean only
    where all replicas have the same number of rows.

    Args:
        per_example_loss: losses of shape (rows, ...). Everything is summed and
            divided by the batch size: average per-pixel losses over their other
            axes first.
        sample_weight: weights that broadcast to the losses, of at most their
            rank.
        global_batch_size: rows of the whole batch, an integer.

    Returns:
        A scalar of the losses' dtype; 0 for a batch size of 0.

    Raises:
        ValueError: for a scalar loss, a negative or non-scalar batch size, or
            weights of another shape.
        TypeError: for a batch size that is no integer.
        RuntimeError: without a batch size in cross-replica context.

    Formula: sum(weights * losses) / global_batch_size (`tf.nn.compute_average_loss`).

    Example:

    >>> import torch, keras_distrib
    >>> keras_distrib.compute_average_loss(torch.tensor([1.0, 2.0, 3.0]), global_batch_size=6)
    tensor(1.)
    """
    losses = _as_float_tensor(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "Invalid value passed for `per_example_loss`. Expected a tensor with at least rank 1. "
            f"Received: per_example_loss={losses}. Use a loss with reduction='none'."
        )
    if sample_weight is not None:
        losses = losses * _broadcastable_weight(sample_weight, losses)
    if global_batch_size is None:
        if context.has_strategy() and context.in_cross_replica_context():
            raise RuntimeError(
                "You are calling `compute_average_loss` in cross replica context, while it was expected to be called "
                "in replica context. Call it in the function that `run` calls, or pass `global_batch_size`."
            )
        batch_size = float(losses.shape[0] * context.get_strategy().num_replicas_in_sync)
    else:
        batch_size = _checked_batch_size(global_batch_size)
    return losses.sum() / batch_size if batch_size else losses.sum() * 0.0


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Divides a regularization loss by the replicas, so that their sum counts it once.

    Args:
        regularization_loss: a scalar, or a tensor that is summed.

    Returns:
        A scalar: the sum divided by the number of replicas that run the step.

    Raises:
        RuntimeError: in cross-replica context.

    Formula: sum(loss) / replicas (`tf.nn.scale_regularization_loss`).

    Example:

    >>> import torch, keras_distrib
    >>> keras_distrib.scale_regularization_loss(torch.tensor([1.0, 2.0]))
    tensor(3.)
    """
    if context.has_strategy() and context.in_cross_replica_context():
        raise RuntimeError(
            "You are calling `scale_regularization_loss` in cross replica context, while it was expected to be called "
            "in replica context. Call it in the function that `run` calls."
        )
    replica = context.get_replica_context()
    replicas = 1 if replica is None else replica.num_active_replicas
    return _as_float_tensor(regularization_loss).sum() / replicas


def _as_float_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, list | tuple) and any(isinstance(part, torch.Tensor) for part in value):
        value = torch.stack([part.sum() for part in value])
    tensor = value if isinstance(value, torch.Tensor) else keras_seam.convert_to_tensor(value)
    return tensor if tensor.is_floating_point() else tensor.to(torch.float64)


def _broadcastable_weight(sample_weight: Any, losses: torch.Tensor) -> torch.Tensor:
    weight = keras_seam.convert_to_tensor(sample_weight).to(losses.device, losses.dtype)
    if weight.ndim == losses.ndim + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    while 0 < weight.ndim < losses.ndim:
        weight = weight.unsqueeze(-1)
    fits = all(own in (1, other) for own, other in zip(weight.shape, losses.shape, strict=False))
    if weight.ndim > losses.ndim or not fits:
        raise ValueError(
            "`sample_weight` must be a scalar, or broadcast to the losses from their first axis. "
            f"Received: sample_weight of shape {tuple(weight.shape)}, losses of shape {tuple(losses.shape)}"
        )
    return weight


def _checked_batch_size(value: Any) -> float:
    if isinstance(value, torch.Tensor) or hasattr(value, "shape"):
        if tuple(value.shape) != ():
            raise ValueError(f"`global_batch_size` must be a scalar. Received: global_batch_size={value!r}")
        value = value.item()
    if isinstance(value, list | tuple):
        raise ValueError(f"`global_batch_size` must be a scalar. Received: global_batch_size={value!r}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`global_batch_size` must be an integer. Received: global_batch_size={value!r}")
    if value < 0:
        raise ValueError(f"`global_batch_size` must be non-negative. Received: global_batch_size={value!r}")
    return float(value)

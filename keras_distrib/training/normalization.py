"""Batch normalization over the rows of all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_distrib import context, keras_seam
from keras_distrib.options import ReduceOp


def moments(layer: Any, original: Callable[[], Any], inputs: torch.Tensor, mask: Any) -> Any:
    """Stands in for `BatchNormalization._moments` where the layer is synchronized.

    Mean and variance are those of all rows, or of all that the mask keeps, on
    whichever replica they are; the gradient flows through them to all replicas.

    Args:
        layer: the layer; its `_reduction_axes` are all axes but the features'.
        original: Keras' own computation, for a layer that is not synchronized.
        inputs: of shape (rows, ..., features).
        mask: of the shape of `inputs` without the last axis, or None.

    Returns:
        Mean and variance, of shape (features,).

    Formula: mean = sum(x) / n and variance = sum((x - mean) ** 2) / n, with sums
    and n over all replicas.
    """
    if not layer.synchronized:
        return original()
    # What every replica writes is the same, also for one that has no rows this time.
    layer.moving_mean.writes_are_equal = layer.moving_variance.writes_are_equal = True
    axes = layer._reduction_axes
    if mask is None:
        kept = inputs
        count = torch.tensor(float(inputs.numel() // max(1, inputs.shape[layer.axis])), device=inputs.device)
        small = 0.0
    else:
        mask = keras_seam.convert_to_tensor(mask).bool()[..., None].expand(inputs.shape)
        kept = torch.where(mask, inputs, 0.0)
        count = mask.sum(axes, keepdim=True).to(inputs.dtype)
        small = keras_seam.epsilon()  # as Keras does, where a mask keeps nothing
    total, count = _add_up(kept.sum(axes, keepdim=True), count)
    mean = total / (count + small)
    difference = inputs - mean if mask is None else torch.where(mask, inputs - mean, 0.0)
    (squares,) = _add_up(difference.square().sum(axes, keepdim=True))
    variance = squares / (count + small)
    return mean.squeeze(axes), variance.squeeze(axes)


def _add_up(*tensors: torch.Tensor) -> list[torch.Tensor]:
    replica = context.running_replica()
    if replica is None or replica.state is None:
        return list(tensors)
    return replica.all_reduce(ReduceOp.SUM, list(tensors))

"""`DatasetCreator`: a dataset function that `Model.fit` calls for each worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_distrib.options import InputContext, InputOptions


class DatasetCreator:
    """Input for `Model.fit`, `evaluate` and `predict` that each worker makes itself.

    Args:
        dataset_fn: called with an `InputContext`; returns a dataset as for
            `Strategy.distribute_datasets_from_function`, of batches of the per-replica
            batch size, usually endless.
        input_options: an `InputOptions`, or None.

    Raises:
        TypeError: if `dataset_fn` is not callable or `input_options` is none.

    Example:

    ```python
    def dataset_fn(input_context):
        batch_size = input_context.get_per_replica_batch_size(64)
        loader = torch.utils.data.DataLoader(dataset, batch_size, shuffle=True)
        return loader


    model.fit(keras_distrib.DatasetCreator(dataset_fn), epochs=3, steps_per_epoch=20)
    ```
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], input_options: InputOptions | None = None) -> None:
        if not callable(dataset_fn):
            raise TypeError(
                f"`dataset_fn` for `DatasetCreator` must be a `callable`. Received: dataset_fn={dataset_fn!r}"
            )
        if input_options is not None and not isinstance(input_options, InputOptions):
            raise TypeError(
                "`input_options` for `DatasetCreator` must be a `keras_distrib.InputOptions`. "
                f"Received: input_options={input_options!r}"
            )
        self.dataset_fn = dataset_fn
        self.input_options = input_options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dataset_fn(*args, **kwargs)

"""The strategy that is current where no other was entered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_distrib import context
from keras_distrib.options import InputContext, RunOptions, ValueContext
from keras_distrib.replicas.replica_context import ReplicaContext
from keras_distrib.strategy import Strategy


class DefaultStrategy(Strategy):
    """Passes everything straight through, as if there were no strategy.

    Library code can ask `get_strategy()` for it and need no special case. It is
    a singleton: get it with `keras_distrib.get_strategy()` outside of any scope.

    Example:

    >>> import keras_distrib
    >>> strategy = keras_distrib.get_strategy()
    >>> strategy.run(lambda x: x + 1, args=(1,))
    2
    """

    def __init__(self) -> None:
        super().__init__(())

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        if context.has_strategy():
            raise RuntimeError(
                "Must not nest tf.distribute.Strategy scopes. "
                f"Received: the default strategy's scope, inside the scope of {context.get_strategy()!r}. "
                "Leave that scope first."
            )
        yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        del options
        context.require_same_strategy(self)
        self._check_call(fn, args, kwargs)
        return fn(*args, **(kwargs or {}))

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        return value_fn(ValueContext())

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        del options
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        del options
        return dataset_fn(InputContext())

    def __repr__(self) -> str:
        return "<DefaultStrategy>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        raise RuntimeError("The default strategy is a singleton. Use `keras_distrib.get_strategy()`.")


_strategy = DefaultStrategy()
context.register_default(context.Frame(_strategy, ReplicaContext(_strategy, 0)))

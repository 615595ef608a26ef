"""`GradientTape`: the guide's way to differentiate, on torch's autograd."""

from __future__ import annotations

import threading
from typing import Any

import torch

from keras_distrib import keras_seam
from keras_distrib.values import leaves, map_structure, pack_like


class _OpenTapes(threading.local):
    """How many tapes of the calling thread record."""

    tapes = 0


_open = _OpenTapes()


class GradientTape:
    """Gradients of what is computed inside its `with` block.

    torch records every operation on trainable variables; the tape turns
    recording on where it was off, and differentiates. In a replica's step the
    gradients are that replica's own; nothing accumulates and nothing has to be
    zeroed.

    Args:
        persistent: whether `gradient` may be called more than once.
        watch_accessed_variables: must be True; torch records by `trainable`.

    Raises:
        ValueError: for `watch_accessed_variables=False`.

    Example:

    >>> import keras, keras_distrib
    >>> variable = keras.Variable(3.0)
    >>> with keras_distrib.GradientTape() as tape:
    ...     loss = variable * variable
    >>> tape.gradient(loss, variable)
    tensor(6.)
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        if not watch_accessed_variables:
            raise ValueError(
                "A torch tape records all trainable variables. Received: watch_accessed_variables=False. "
                "Set `variable.trainable = False` for those that need no gradient."
            )
        self._persistent = persistent
        self._used = False
        self._grad_mode: torch.enable_grad | None = None

    def __enter__(self) -> GradientTape:
        self._grad_mode = torch.enable_grad()
        self._grad_mode.__enter__()
        _open.tapes += 1
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._grad_mode is not None:
            _open.tapes -= 1
            self._grad_mode.__exit__(*exception)
            self._grad_mode = None

    def watch(self, tensor: Any) -> None:
        """Records operations on a tensor that is no variable.

        Args:
            tensor: a leaf tensor of floats, or a nested structure of them.
        """
        for leaf in leaves(tensor):
            self._tensor_of(leaf).requires_grad_(True)

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, unconnected_gradients: str = "none"
    ) -> Any:
        """Differentiates the target with respect to the sources.

        Args:
            target: a tensor, or several, which are summed.
            sources: a variable or tensor, or a nested structure of them.
            output_gradients: gradients of the targets, of their shapes; None
                means ones.
            unconnected_gradients: `"none"` gives None, `"zero"` zeros, where the
                target does not depend on a source.

        Returns:
            The structure of `sources` with a gradient of the source's shape each.

        Raises:
            RuntimeError: at a second call on a tape that is not persistent.
            ValueError: for another `unconnected_gradients`.
        """
        if self._used and not self._persistent:
            raise RuntimeError(
                "A non-persistent GradientTape can only be used to compute one set of gradients. "
                "Make it with `GradientTape(persistent=True)`."
            )
        if unconnected_gradients not in ("none", "zero"):
            raise ValueError(
                '`unconnected_gradients` must be "none" or "zero". '
                f"Received: unconnected_gradients={unconnected_gradients!r}"
            )
        self._used = True
        targets = [self._tensor_of(leaf) for leaf in leaves(target)]
        flat = [self._tensor_of(leaf) for leaf in leaves(sources)]
        given = [None] * len(targets) if output_gradients is None else list(leaves(output_gradients))
        gradients = self._differentiate(targets, flat, given)
        if unconnected_gradients == "zero":
            pairs = zip(gradients, flat, strict=True)
            gradients = [torch.zeros_like(tensor) if gradient is None else gradient for gradient, tensor in pairs]
        return pack_like(map_structure(lambda _: None, sources), gradients)

    def _differentiate(
        self, targets: list[torch.Tensor], sources: list[torch.Tensor], given: list[Any]
    ) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = [None] * len(sources)
        connected = [(t, torch.ones_like(t) if g is None else g) for t, g in zip(targets, given, strict=True)]
        connected = [(tensor, gradient) for tensor, gradient in connected if tensor.requires_grad]
        positions = [position for position, source in enumerate(sources) if source.requires_grad]
        if connected and positions:
            found = torch.autograd.grad(
                [tensor for tensor, _ in connected],
                [sources[position] for position in positions],
                [gradient for _, gradient in connected],
                # A tape that is open records the differentiation too.
                create_graph=_open.tapes > 0,
                retain_graph=self._persistent or _open.tapes > 0,
                allow_unused=True,
            )
            for position, gradient in zip(positions, found, strict=True):
                gradients[position] = gradient
        return gradients

    @staticmethod
    def _tensor_of(source: Any) -> torch.Tensor:
        tensor = source.value if isinstance(source, keras_seam.Variable) else source
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"A tape differentiates variables and tensors. Received: {source!r}")
        return tensor

"""Machine code for a captured step's segments, by torch's Inductor."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

from keras_distrib.capture.graph import Cut

logger = logging.getLogger("keras_distrib")

_compiling = threading.RLock()  # Inductor's settings are those of the process


def compile_segments(cut: Cut, threads: int) -> None:
    """Lets Inductor make code of each segment that it can take.

    The code is kept in torch's own cache on disk. Where there is no compiler for it,
    the graphs run as they are, and the log says so.

    Args:
        cut: the step; its segments are changed in place.
        threads: how many threads each replica computes with.
    """
    for part in cut.parts:
        segment = part.segment
        if not segment.compiles or not any(node.op == "call_function" for node in segment.module.graph.nodes):
            continue
        options: dict[str, Any] = {"cpp.threads": threads, "fallback_random": True}
        if any(isinstance(own, torch.Tensor) and own.is_cuda for own in segment.examples()):
            options["triton.cudagraphs"] = True
        try:
            with _compiling, torch.no_grad(), config.patch(options):
                segment.call = compile_fx(segment.module, segment.examples())  # type: ignore[assignment]
        except Exception as error:  # noqa: BLE001 - a compiler can fail in any way, and the graph runs without it
            reason = (str(error).strip().splitlines() or [""])[0]
            logger.warning(
                "Inductor could not compile a graph, which runs as it is: %s: %s", type(error).__name__, reason[:300]
            )

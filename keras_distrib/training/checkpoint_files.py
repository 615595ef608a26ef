"""Checkpoints on disk: written whole or not at all.

A checkpoint is a directory that `torch.distributed.checkpoint` writes. It is
written under another name first, and renamed when it is complete. A file named
`checkpoint` lists those of a directory, the newest last.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_entries
from torch.distributed.checkpoint.state_dict_saver import save as save_entries

INDEX = "checkpoint"
PARTIAL = ".partial"
_OLD = ".old"


_writing = threading.Lock()  # one checkpoint at a time: threads may write to one path


def write(path: Path, entries: dict[str, Any]) -> None:
    """Writes a checkpoint; what was at `path` stays until it is complete.

    Raises:
        FileExistsError: if there is something else at the path.
        OSError: if it cannot be written.
    """
    with _writing:
        _write(path, entries)


def _write(path: Path, entries: dict[str, Any]) -> None:
    if path.exists() and not (path / ".metadata").is_file():
        raise FileExistsError(
            f"There is something else than a checkpoint at {path}. Received: path={str(path)!r}. Choose another path."
        )
    partial = path.with_name(path.name + PARTIAL)
    old = path.with_name(path.name + _OLD)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with _quiet():
            save_entries(dict(entries), checkpoint_id=partial, no_dist=True)
        if path.exists():
            path.rename(old)
        partial.rename(path)
    except BaseException as error:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, CheckpointException):  # torch's own, which is no `Exception`
            raise OSError(f"The checkpoint cannot be written to {path}: {error}") from error
        raise
    shutil.rmtree(old, ignore_errors=True)
    _sync_directory(path.parent)


def read(path: Path) -> dict[str, Any]:
    """Reads all entries of a checkpoint.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it cannot be read.
    """
    if not (path / ".metadata").is_file():
        found = sorted(other.parent.name for other in path.parent.glob("*/.metadata"))
        raise FileNotFoundError(
            f"Failed to find any matching files for {path}: there is no checkpoint. Received: path={str(path)!r}. "
            f"Checkpoints in that directory: {found}. Pass a path that `save` or `latest_checkpoint` returned."
        )
    try:
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        stored: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for name, entry in metadata.items()
        }
        with _quiet():
            load_entries(stored, checkpoint_id=path, no_dist=True)
    except (Exception, CheckpointException) as error:  # torch's own is no `Exception`
        raise ValueError(
            f"The checkpoint at {path} cannot be read: {error}. Received: path={str(path)!r}. "
            "It may have been cut short when it was copied; restore another one."
        ) from error
    return stored


class Saved(NamedTuple):
    """One checkpoint of a directory: its name, and when it was saved, in seconds since 1970."""

    name: str
    time: float


def read_index(directory: Path, filename: str = INDEX) -> list[Saved]:
    """The checkpoints of a directory that are still there, the newest last.

    Without a list that can be read, what is there counts, by the time it was written.
    """
    try:
        listed = json.loads((directory / filename).read_text())["checkpoints"]
        saved = [Saved(str(name), float(time)) for name, time in listed]
    except (OSError, ValueError, KeyError, TypeError):
        found = [Saved(entry.parent.name, entry.stat().st_mtime) for entry in directory.glob("*-*/.metadata")]
        return sorted((entry for entry in found if not entry.name.endswith((PARTIAL, _OLD))), key=lambda e: e.time)
    return [entry for entry in saved if (directory / entry.name / ".metadata").is_file()]


def write_index(directory: Path, saved: Iterable[Saved], filename: str = INDEX) -> None:
    """Lists the checkpoints of a directory, the newest last."""
    partial = directory / (filename + PARTIAL)
    partial.write_text(json.dumps({"checkpoints": [list(entry) for entry in saved]}, indent=1))
    os.replace(partial, directory / filename)


def remove(path: Path) -> None:
    """Removes a checkpoint."""
    shutil.rmtree(path, ignore_errors=True)


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Without torch's notice that there is one process."""
    stack = contextlib.ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    return stack


def _sync_directory(directory: Path) -> None:
    """Makes renames last over a crash of the machine."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""`Checkpoint` and `CheckpointManager`: the state of a custom loop, saved and restored."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_distrib import context, keras_seam
from keras_distrib.training import checkpoint_files as files
from keras_distrib.training.checkpoint_files import Saved
from keras_distrib.training.saveables import Part, parts

logger = logging.getLogger("keras_distrib")

PathLike = str | os.PathLike[str]


class Checkpoint:
    """The state of models, optimizers, variables and iterators, in one place.

    A checkpoint written under one strategy restores under any other, or none: a
    variable is saved as the value that reading it gives. Objects that are not built
    yet take their state when they are.

    Args:
        root: an object whose state is saved under the name `root`.
        **objects: Keras models, layers, optimizers, metrics and variables, objects
            with `get_state`/`set_state` or `state_dict`/`load_state_dict` such as a
            distributed iterator, other checkpoints, and lists and dicts of these. They
            are attributes of the checkpoint, and more can be set.

    Raises:
        TypeError: at `save`, for an object without such state.

    Attributes:
        save_counter: a variable that counts calls of `save`.

    Example:

    ```python
    checkpoint = keras_distrib.Checkpoint(model=model, optimizer=optimizer, step=step)
    path = checkpoint.save("checkpoints/digits")  # checkpoints/digits-1
    checkpoint.restore(path)
    ```
    """

    def __init__(self, root: Any = None, **objects: Any) -> None:
        if root is not None:
            objects = {"root": root, **objects}
        for name, value in objects.items():
            if hasattr(type(self), name) or name.startswith("_") or name == "save_counter":
                raise ValueError(
                    f"A checkpoint cannot hold an object of this name. Received: {name}={value!r}. "
                    "Choose a name that is no method or attribute of `Checkpoint`."
                )
            setattr(self, name, value)
        with context.outside_strategies():
            self.save_counter = keras_seam.Variable(0, dtype="int64", trainable=False, name="save_counter")

    def tracked_objects(self) -> dict[str, Any]:
        """What the checkpoint holds, by name."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def write(self, file_prefix: PathLike) -> str:
        """Writes a checkpoint at a path; `save` numbers them.

        It is complete when this returns; a process that ends meanwhile leaves none, and
        the one that was there before.

        Args:
            file_prefix: the path of the checkpoint, a directory that is made.

        Returns:
            The path.

        Raises:
            RuntimeError: in a replica's function.
            TypeError: if an object has no state that could be saved.
        """
        _require_cross_replica("Checkpoint.write")
        entries = {}
        for part in parts(self.tracked_objects(), ""):
            entries |= {f"{part.path}/{name}"[1:]: value for name, value in part.collect().items()}
        path = Path(file_prefix)
        files.write(path, entries)
        return str(file_prefix)

    def save(self, file_prefix: PathLike) -> str:
        """Counts, and writes a checkpoint under that number.

        Args:
            file_prefix: path of the checkpoints without their number.

        Returns:
            The path, `<file_prefix>-<number>`, for `restore`.

        Raises:
            RuntimeError: in a replica's function.
            TypeError: if an object has no state that could be saved.
        """
        _require_cross_replica("Checkpoint.save")
        self.save_counter.assign_add(1)
        try:
            path = self.write(f"{os.fspath(file_prefix)}-{int(self.save_counter.value)}")
        except BaseException:
            self.save_counter.assign_sub(1)
            raise
        directory, name = Path(path).parent, Path(path).name
        listed = [saved for saved in files.read_index(directory) if saved.name != name]
        files.write_index(directory, [*listed, Saved(name, time.time())])
        return path

    def read(self, save_path: PathLike) -> RestoreStatus:
        """Restores what `write` wrote; the same as `restore`."""
        return self.restore(save_path)

    def restore(self, save_path: PathLike | None) -> RestoreStatus:
        """Sets the objects' state from a checkpoint.

        All of it is read and compared with the objects first: on an error nothing is
        changed. Layers and optimizers that are not built yet take their state when they
        are built.

        Args:
            save_path: a path that `save` or `latest_checkpoint` returned; None restores
                nothing.

        Returns:
            A `RestoreStatus`, whose methods check that everything was restored.

        Raises:
            FileNotFoundError: if there is no checkpoint.
            ValueError: if it cannot be read, or shapes differ.
            RuntimeError: in a replica's function.
        """
        _require_cross_replica("Checkpoint.restore")
        if save_path is None:
            return RestoreStatus(None, {})
        status = RestoreStatus(str(save_path), files.read(Path(save_path)))
        status.restore_into(self.tracked_objects(), "")
        return status

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self.tracked_objects())}>"


class RestoreStatus:
    """What a `restore` has done, and has still to do when objects are built.

    Args:
        path: the checkpoint's path; None if there was none.
        entries: its entries, by name.
    """

    def __init__(self, path: str | None, entries: dict[str, Any]) -> None:
        self._path = path
        self._pending = entries
        self._restored: set[str] = set()
        self._without_value: list[str] = []

    def restore_into(self, owner: Any, path: str) -> None:
        """Restores an object and what is in it, now or when it is built."""
        now: list[tuple[Part, dict[str, Any]]] = []
        waiting: list[Part] = []
        for part in parts(owner, path):
            entries = self._own_entries(part)
            if not part.is_built:
                waiting.append(part)
                if not entries or set(entries) != set(part.collect()):
                    continue
            if entries:
                part.check(entries)
                now.append((part, entries))
            elif part.path not in self._restored and part.collect():
                self._without_value.append(part.path[1:])
        for part, entries in now:
            part.load(entries)
            self._restored.add(part.path)
            for name in entries:
                self._pending.pop(f"{part.path}/{name}"[1:], None)
        for part in waiting:
            if any(name.startswith(part.path[1:] + "/") for name in self._pending):
                _after_build(part.owner, functools.partial(self.restore_into, part.owner, part.path))

    def _own_entries(self, part: Part) -> dict[str, Any]:
        prefix = f"{part.path}/"[1:]
        return {
            name.removeprefix(prefix): value
            for name, value in self._pending.items()
            if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
        }

    def assert_consumed(self) -> RestoreStatus:
        """Checks that every value of the checkpoint was used, and every object has one.

        Returns:
            The status itself.

        Raises:
            ValueError: naming what was not.
        """
        if self._path is None:
            raise ValueError(
                "No checkpoint specified (save_path=None); nothing is being restored. Received: save_path=None"
            )
        if self._pending:
            raise ValueError(
                "Unresolved object in checkpoint: some values were not used, since no object asked for them yet. "
                f"Received: path={self._path!r}, unused={sorted(self._pending)}. Build the objects first, or call "
                "`expect_partial()`."
            )
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Checks that every object that is built has a value in the checkpoint.

        Returns:
            The status itself.

        Raises:
            ValueError: naming those that have none.
        """
        if self._path is None or self._without_value:
            raise ValueError(
                "Some objects have no value in the checkpoint. "
                f"Received: path={self._path!r}, without a value={self._without_value}"
            )
        return self

    def expect_partial(self) -> RestoreStatus:
        """Says that unused values are meant; nothing is checked.

        Returns:
            The status itself.
        """
        return self


class CheckpointManager:
    """Keeps the newest checkpoints of a directory.

    Args:
        checkpoint: the `Checkpoint` to save.
        directory: where to; it is made.
        max_to_keep: how many checkpoints stay; None keeps all.
        keep_checkpoint_every_n_hours: also keep one for each so many hours.
        checkpoint_name: the name of the checkpoints, without their number.
        step_counter: a variable that counts steps, for `checkpoint_interval`.
        checkpoint_interval: save no more often than every so many steps.
        init_fn: called by `restore_or_initialize` where there is no checkpoint.

    Raises:
        ValueError: for `max_to_keep` less than 1, or an interval without a counter.

    Example:

    ```python
    manager = keras_distrib.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3)
    checkpoint.restore(manager.latest_checkpoint)
    for epoch in range(10):
        ...
        manager.save()
    ```
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: PathLike,
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(
                f"Expected a positive integer or `None` for `max_to_keep`. Received: max_to_keep={max_to_keep!r}"
            )
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError(
                "`step_counter` should be passed if `checkpoint_interval` is not None. "
                f"Received: checkpoint_interval={checkpoint_interval!r}, step_counter=None"
            )
        self._checkpoint = checkpoint
        self._directory = Path(directory)
        self._max_to_keep = max_to_keep
        self._keep_every_s = None if keep_checkpoint_every_n_hours is None else keep_checkpoint_every_n_hours * 3600
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._last_step: int | None = None
        self._last_kept = time.time()

    @property
    def checkpoint(self) -> Checkpoint:
        """The `Checkpoint` that is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Where checkpoints are saved."""
        return str(self._directory)

    @property
    def checkpoint_interval(self) -> int | None:
        """How many steps lie between checkpoints at least."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are there, the newest last."""
        return [str(self._directory / saved.name) for saved in self._saved()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint, None if there is none."""
        return self.checkpoints[-1] if self.checkpoints else None

    def save(self, checkpoint_number: int | None = None, check_interval: bool = True) -> str | None:
        """Saves a checkpoint, and removes those that are too many.

        Args:
            checkpoint_number: its number; None counts on.
            check_interval: whether to keep to `checkpoint_interval`.

        Returns:
            Its path, or None if it is too early for one.

        Raises:
            RuntimeError: in a replica's function.
        """
        step = self._step()
        if (
            check_interval
            and self._interval
            and self._last_step is not None
            and step < self._last_step + self._interval
        ):
            return None
        if checkpoint_number is not None:
            self._checkpoint.save_counter.assign(checkpoint_number - 1)
        path = self._checkpoint.save(self._directory / self._name)
        self._last_step = step
        self._remove_old()
        return path

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint, or calls `init_fn` if there is none.

        Returns:
            The path that was restored, or None.
        """
        latest = self.latest_checkpoint
        if latest is not None:
            self._checkpoint.restore(latest)
            self._last_step = self._step()
        elif self._init_fn is not None:
            self._init_fn()
        return latest

    def _step(self) -> int:
        return 0 if self._step_counter is None else int(keras_seam.to_numpy(self._step_counter))

    def _saved(self) -> list[Saved]:
        """The checkpoints of this manager's name; the directory may hold others."""
        return [saved for saved in files.read_index(self._directory) if saved.name.startswith(f"{self._name}-")]

    def _remove_old(self) -> None:
        own = self._saved()
        surplus = own[: -self._max_to_keep] if self._max_to_keep is not None else []
        removed = set()
        for saved in surplus:
            if self._keep_every_s is not None and saved.time - self._last_kept >= self._keep_every_s:
                self._last_kept = saved.time
                continue
            removed.add(saved)
        if not removed:
            return
        files.write_index(self._directory, [s for s in files.read_index(self._directory) if s not in removed])
        for saved in removed:
            files.remove(self._directory / saved.name)


def latest_checkpoint(checkpoint_dir: PathLike, latest_filename: str | None = None) -> str | None:
    """The path of the newest checkpoint in a directory.

    Args:
        checkpoint_dir: the directory that `Checkpoint.save` wrote to.
        latest_filename: the name of the file that lists them; None means
            `checkpoint`.

    Returns:
        A path for `Checkpoint.restore`, or None if there is none.

    Example:

    >>> import keras_distrib
    >>> keras_distrib.latest_checkpoint("a_directory_without_any")
    """
    saved = files.read_index(Path(checkpoint_dir), latest_filename or files.INDEX)
    return os.path.join(checkpoint_dir, saved[-1].name) if saved else None


def _after_build(owner: Any, restore: Callable[[], None]) -> None:
    """Calls `restore` once, when Keras has built the object."""
    original = owner.build

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        owner.build = original
        keras_seam.when_variables_exist(restore)
        return result

    owner.build = build


def _require_cross_replica(method: str) -> None:
    if context.running_replica() is not None:
        raise RuntimeError(
            f"{context.REQUIRES_CROSS_REPLICA}. Received: `{method}` in a replica's function. "
            "Call it outside of `Strategy.run`."
        )

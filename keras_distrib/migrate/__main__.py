"""The command `python -m keras_distrib.migrate`."""

from __future__ import annotations

import argparse
import os
import pathlib
import stat
import sys
import tempfile
from collections.abc import Sequence

from keras_distrib.migrate import migrate

EVERYTHING, SOME, ERROR = 0, 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m keras_distrib.migrate",
        description="Moves scripts from tf.distribute and tf.keras to keras_distrib and Keras 3 on PyTorch.",
        epilog="Ends with 0 if everything has a counterpart, with 1 if something has none, with 2 on an error.",
    )
    parser.add_argument("scripts", nargs="+", metavar="script.py", type=pathlib.Path)
    parser.add_argument("--write", action="store_true", help="edit the scripts in place; without it nothing changes")
    return parser


def _read(path: pathlib.Path) -> bytes:
    if path.suffix == ".ipynb":
        raise ValueError("Notebooks are not read. Export it with `jupyter nbconvert --to script`.")
    return path.read_bytes()


def replace(path: pathlib.Path, data: bytes) -> None:
    """Writes a file whole or not at all, with the mode it had."""
    path = path.resolve()  # a link stays a link
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, stat.S_IMODE(path.stat().st_mode))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _migrate_file(path: pathlib.Path, write: bool) -> int:
    try:
        data = _read(path)
        migration = migrate(data)
        if write and migration.code != data:
            replace(path, migration.code)
    except (OSError, SyntaxError, ValueError) as error:
        print(f"{path}: {error}. The file was not changed.", file=sys.stderr)  # noqa: T201
        return ERROR
    print("\n".join(migration.report.lines(str(path))))  # noqa: T201
    return SOME if migration.report.missing else EVERYTHING


def main(arguments: Sequence[str] | None = None) -> int:
    """Migrates the scripts of a command line.

    Returns:
        The worst of the scripts' exit codes.
    """
    options = _parser().parse_args(arguments)
    return max(_migrate_file(path, options.write) for path in options.scripts)


if __name__ == "__main__":
    sys.exit(main())

"""Python processes that tests start, and that end with the test."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def python(*arguments, cwd=None, timeout=110, **environment):
    """Runs Python with the checkout's package to its end; an environment value of None unsets it.

    The process is killed when `timeout` seconds are over.
    """
    env = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={name: value for name, value in env.items() if value is not None},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def output(*arguments, **options):
    """What a Python process printed, which must have ended well."""
    done = python(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout

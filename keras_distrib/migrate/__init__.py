"""Moves scripts from TensorFlow to Keras on torch: `python -m keras_distrib.migrate script.py [--write]`.

A script's *report* says what becomes what, what has no counterpart and what is
left as it is. Names are found by their scope, so that strings, comments and
other things called `tf` are never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_distrib.migrate.report import Report

__all__ = ["Migration", "migrate"]


@dataclass(frozen=True)
class Migration:
    """A migrated script.

    Attributes:
        code: its new bytes, those it had if nothing changed.
        report: what was found in it.
    """

    code: bytes
    report: Report


def migrate(code: bytes | str) -> Migration:
    """Moves one script from TensorFlow to Keras on torch.

    Args:
        code: the script; bytes keep their encoding.

    Returns:
        The `Migration`.

    Raises:
        ImportError: without libcst, which the extra `migrate` installs.
        SyntaxError: for what is not Python.

    Example:

    >>> import keras_distrib.migrate
    >>> migration = keras_distrib.migrate.migrate("import tensorflow as tf\\ns = tf.distribute.get_strategy()\\n")
    >>> print(migration.code.decode().splitlines()[-1])
    s = keras_distrib.get_strategy()
    """
    try:
        import libcst as cst
        from libcst import metadata
    except ImportError as error:
        raise ImportError(
            'keras_distrib.migrate needs libcst. Install it with `pip install "keras-distrib[migrate]"`.'
        ) from error
    from keras_distrib.migrate.analysis import Analysis
    from keras_distrib.migrate.rewriter import Rewriter
    from keras_distrib.migrate.tree import Script

    data = code.encode() if isinstance(code, str) else code
    try:
        module = cst.parse_module(data)
    except cst.ParserSyntaxError as error:
        raise SyntaxError(f"line {error.raw_line}: {error.message}") from error
    script = Script(metadata.MetadataWrapper(module))
    analysis = Analysis(script)
    analysis.run()
    if not analysis.edits:
        return Migration(data, analysis.report)
    new = script.module.visit(Rewriter(analysis.edits)).bytes
    compile(new, "<migrated>", "exec")
    return Migration(new, analysis.report)

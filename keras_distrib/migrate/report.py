"""What the tool found in one script: changes, names without counterpart, names left as they are."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Line:
    """One line of a report."""

    number: int
    text: str

    def __str__(self) -> str:
        return f"  line {self.number}: {self.text}"


@dataclass
class Report:
    """What becomes of a script.

    Attributes:
        changes: what becomes what.
        missing: what has no counterpart, with the reason.
        kept: what stays TensorFlow's for tf.data.
        uses_tensorflow: whether the script has anything of TensorFlow.
    """

    changes: set[Line] = field(default_factory=set)
    missing: set[Line] = field(default_factory=set)
    kept: set[Line] = field(default_factory=set)
    uses_tensorflow: bool = False

    def change(self, number: int, before: str, after: str, note: str = "") -> None:
        self.changes.add(Line(number, f"{before} -> {after}" + (f" ({note})" if note else "")))

    def add(self, number: int, text: str) -> None:
        self.changes.add(Line(number, f"added: {text}"))

    def miss(self, number: int, name: str, reason: str) -> None:
        self.missing.add(Line(number, f"{name}: {reason}"))

    def keep(self, number: int, name: str) -> None:
        self.kept.add(Line(number, name))

    def lines(self, path: str) -> list[str]:
        """The report as it is printed."""
        if not (self.uses_tensorflow or self.changes or self.missing):
            return [f"{path}: does not use tensorflow, unchanged"]
        parts = [path]
        for title, found in (
            ("changes", self.changes),
            ("no counterpart", self.missing),
            ("left as it is (tf.data)", self.kept),
        ):
            if found:
                parts += [f" {title}:", *map(str, sorted(found))]
        if not self.changes:
            parts.append(" nothing to change")
        return parts

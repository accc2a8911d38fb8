"""A mutant: an edit of one file, and its effect for users."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

AREAS = ("tensor", "sequence", "context", "pipeline", "ZeRO", "checkpoints", "engine", "policies")


class DoesNotApplyError(Exception):
    """The old text of a mutant does not occur exactly once."""


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Args:
        file: path in the repository.
        old, new: the replaced text, which occurs once in the file, and its replacement.
        effect: the effect for users.
        first: the tests that run first: files, folders or node ids.
    """

    area: str
    name: str
    file: str
    old: str
    new: str
    effect: str
    first: tuple[str, ...] = ()

    def mutated(self, source: str) -> str:
        """Return the source with the fault. Raises DoesNotApplyError."""
        if (count := source.count(self.old)) != 1:
            raise DoesNotApplyError(f"{self.name}: the old text occurs {count} times in {self.file}")
        return source.replace(self.old, self.new)

    def apply(self, tree: Path) -> None:
        """Write the fault into a copy of the repository. Raises DoesNotApplyError."""
        path = tree / self.file
        if not path.is_file():
            raise DoesNotApplyError(f"{self.name}: there is no {self.file}")
        path.write_text(self.mutated(path.read_text(encoding="utf-8")), encoding="utf-8")

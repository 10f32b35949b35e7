"""What a mutant is: one known fault, as the exact text that it puts into one file, and the tests that must see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant", "NotApplicable"]


class NotApplicable(Exception):
    """The text that a mutant replaces is not in its file exactly once: the code has changed, the mutant must too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault that was made before, here or by others, and must never come back unseen.

    Parameters:
        name: of the fault, short, for people and for ``--only``.
        of: the report that had it (``R0`` to ``R4``) or the promise that it breaks (``P1`` to ``P14``), and more.
        breaks: what users would see, in one line.
        file: below ``src/holdfast``.
        old: exact text that occurs once in the file; line breaks at its ends do not count.
        new: what stands in its place in the mutant; so here.
        tests: arguments for pytest, files or single tests: the smallest set that should see it.
        also: further replacements in the same file, where the fault needs them.
    """

    name: str
    of: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()

    def apply(self, source: str) -> str:
        """The file with the fault in it. Raises `NotApplicable`."""
        for pair in ((self.old, self.new), *self.also):
            old, new = (text.strip("\n") for text in pair)
            found = source.count(old)
            if found != 1:
                raise NotApplicable(f"{self.name}: its text is {found} times in {self.file}, not once:\n{old}")
            if old == new:
                raise NotApplicable(f"{self.name}: it changes nothing in {self.file}")
            source = source.replace(old, new)
        return source

    def put_into(self, root: Path) -> str:
        """Write the fault into the tree at ``root``; returns what was there. Raises `NotApplicable`."""
        path = root / "src" / "holdfast" / self.file
        before = path.read_text("utf-8")
        path.write_text(self.apply(before), "utf-8")
        forget_compiled(path)
        return before

    def take_out_of(self, root: Path, before: str) -> None:
        """Undo `put_into`."""
        path = root / "src" / "holdfast" / self.file
        path.write_text(before, "utf-8")
        forget_compiled(path)


def forget_compiled(path: Path) -> None:
    """Drop the compiled form of a file: two versions of one size and second look alike to the interpreter."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()

"""A failing schedule as a file: its choices, its test, and the versions and options of the recording."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

from holdfast.version import __version__

__all__ = ["Replay"]

_FORMAT = "holdfast-replay-1"


def _versions() -> dict[str, str]:
    return {"holdfast": __version__, "python": platform.python_version()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One schedule of one test, to be run again with ``explore(test, replay=…)`` or ``pytest --explore-replay FILE``.

    Parameters:
        test: pytest's node id of the test, or ``module:name``.
        choices: index of the step that was taken, for each point at which at least two steps could run.
        late_s: the ``late_s`` that was passed to `explore`.
        tasks: the ``tasks`` that was passed to `explore`.
        max_steps: the ``max_steps`` that was passed to `explore`.
        kind: kind of failure, as in `ScheduleFailure`.
        text: description of the failure.
        versions: versions of Holdfast and Python at the time of recording.
    """

    test: str
    choices: tuple[int, ...]
    late_s: float = 0.0
    tasks: Literal["ordinary", "eager"] = "ordinary"
    max_steps: int = 20_000
    kind: str = ""
    text: str = ""
    versions: dict[str, str] = field(default_factory=_versions)

    def save(self, path: str | Path) -> Path:
        """Write the replay to a file as JSON, and return the file's path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n", "utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Replay:
        """Read a replay from a file that `save` wrote.

        Raises:
            ValueError: if the file is not a replay, or if this version of Holdfast does not support the file's format.
            OSError: if the file cannot be read.
        """
        known = {one.name for one in fields(cls)}
        try:
            read = json.loads(Path(path).read_text("utf-8"))
            if read.pop("format") != _FORMAT or set(read) != known:
                raise ValueError("another format")
            choices = tuple(read.pop("choices"))
            if not all(type(choice) is int and choice >= 0 for choice in choices):
                raise ValueError("choices must be whole numbers, 0 or more")
            if read["tasks"] not in ("ordinary", "eager") or not isinstance(read["versions"], dict):
                raise ValueError("tasks must be 'ordinary' or 'eager', and versions must be an object")
            return cls(choices=choices, **read)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a replay file of this version ({_FORMAT}): {error!r}; run the test again for a new one"
            ) from error

    def changed_since(self) -> str:
        """Describe the versions that have changed since the recording; return an empty string if none has changed."""
        now = _versions()
        return ", ".join(
            f"{name} was {then}, is {now[name]}" for name, then in self.versions.items() if now.get(name, then) != then
        )

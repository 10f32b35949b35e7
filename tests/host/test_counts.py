"""Every counter of a host has a meaning that is written down."""

from __future__ import annotations

import re
from pathlib import Path

import holdfast.host
from holdfast.host import COUNTS

SOURCES = Path(holdfast.host.__file__).parent


def test_every_name_that_is_counted_is_explained_and_nothing_else() -> None:
    written = "\n".join(path.read_text() for path in SOURCES.glob("*.py"))
    names = set(re.findall(r'counts\[f?"([^"]+)"\]', written))
    assert {re.sub(r"[{<].*[}>]", "", name) for name in names} == {re.sub(r"<.*>", "", name) for name in COUNTS}

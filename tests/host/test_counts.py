"""Every counter of a host has a meaning that is written down."""

from __future__ import annotations

import re
from pathlib import Path

import holdfast.host
import holdfast.server
from holdfast.host import COUNTS

SOURCES = [Path(package.__file__).parent for package in (holdfast.host, holdfast.server) if package.__file__]


def test_every_name_that_is_counted_is_explained_and_nothing_else() -> None:
    written = "\n".join(path.read_text() for folder in SOURCES for path in folder.glob("*.py"))
    names = set(re.findall(r'counts\[f?"([^"]+)"\]', written))
    assert {re.sub(r"[{<].*[}>]", "", name) for name in names} == {re.sub(r"<.*>", "", name) for name in COUNTS}

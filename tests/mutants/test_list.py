"""The list of mutants does not rot: each can still be put into the source, and its tests are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant, NotApplicable

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_source_once_and_still_compiles(mutant: Mutant) -> None:
    source = (ROOT / "src" / "holdfast" / mutant.file).read_text("utf-8")
    faulty = mutant.apply(source)
    assert faulty != source
    if mutant.file.endswith(".py"):
        compile(faulty, mutant.file, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text("utf-8")
        assert f"def {name.partition('[')[0]}(" in text if name else "def test_" in text, test


def test_every_report_has_its_mutants_and_there_are_thirty_in_all() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    for report in ("R0", "R1", "R2", "R3", "R4"):
        assert any(report in mutant.of.split() for mutant in MUTANTS), report
    assert len(MUTANTS) >= 30


def test_a_mutant_whose_text_is_gone_or_twice_there_is_refused() -> None:
    mutant = Mutant(name="m", of="R0", breaks="", file="x.py", old="a", new="b", tests=("t",))
    assert mutant.apply("xax") == "xbx"
    for text in ("xx", "axa"):
        with pytest.raises(NotApplicable):
            mutant.apply(text)

"""A store that breaks a rule is told which one, and what the port says of the verb."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import HoldfastError
from holdfast.testing import STORE_CHECKS, run_store_check
from tests.testing.suites import (  # noqa: F401 - they add to FAULTS
    store_faults_agents,
    store_faults_grants,
    store_faults_people,
    store_faults_records,
)
from tests.testing.suites.store_faults import FAULTS, CommitsOnlyTheEnd


def test_a_broken_rule_is_named_with_the_verb_and_the_port() -> None:
    [check] = [one for one in STORE_CHECKS if one.__name__ == "a_commit_writes_everything_and_frees_the_slot"]
    with pytest.raises(AssertionError) as failed:
        run_store_check(check, CommitsOnlyTheEnd)
    verb, rule = failed.value.__notes__[-2:]
    assert verb.startswith("the store method that was called last: Store.commit_run: End a run: write its last events")
    assert "a commit writes everything and frees the slot" in rule
    assert "holdfast/storage/port.py" in rule


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_the_check_finds_a_store_with_the_fault(check: Any) -> None:
    store = FAULTS[check.__name__]()
    with pytest.raises((AssertionError, HoldfastError)) as failed:
        run_store_check(check, lambda: store)
    assert any("the rule that is broken" in note for note in failed.value.__notes__)


@pytest.mark.parametrize("name", ["STORE_CHECKS", "MODEL_CHECKS", "AGENT_CHECKS", "CHANNEL_CHECKS"])
def test_every_suite_has_a_public_face_and_rules_that_read_as_sentences(name: str) -> None:
    import holdfast.testing

    checks: Any = getattr(holdfast.testing, name)
    kind = name.partition("_")[0].lower()
    assert callable(getattr(holdfast.testing, f"run_{kind}_check"))
    assert len({check.__name__ for check in checks}) == len(checks) > 10
    assert all("_" in check.__name__ and not check.__name__.startswith("test") for check in checks)

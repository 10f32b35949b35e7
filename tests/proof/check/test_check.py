"""Each probe sees its promise kept by a right runtime and broken by one with the fault; Holdfast keeps its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigurationError
from holdfast.proof.check import kit
from holdfast.proof.check.environments import FRAMEWORKS, target_of
from holdfast.proof.check.judge import judge
from holdfast.proof.check.probes import PROBES
from holdfast.proof.check.subject import SubjectTarget
from holdfast.proof.check.verdicts import AdapterVerdict, Finding
from tests.proof.check.adapters import FAULTS

HERE = Path(__file__).parent
LONG = {"stuck tools delay nobody", "live work listed", "no leaks", "messages survive kill -9", "next run works"}
QUICK = {"model request closed", "process tree ended", "transcript valid", "sync tool ended by force"}
KNOWN = {"sync tool ended"}
"""What Holdfast does not keep: a thread whose tool never looks up goes on through the grace, and after it."""


def look(target: SubjectTarget, promise: str, *, times: int = 1) -> Finding:
    async def bounded() -> AdapterVerdict:
        async with asyncio.timeout(100):
            return await judge(target, promises=[promise], times=times)

    return asyncio.run(bounded()).findings[0]


def reference(name: str) -> SubjectTarget:
    return SubjectTarget(name=name, adapter=f"{HERE / 'adapters.py'}:{name}", python=sys.executable)


def some(*, long: set[str]) -> list[object]:
    return [pytest.param(one, marks=pytest.mark.nightly if one in long else ()) for one in PROBES]


@pytest.mark.parametrize("promise", some(long=LONG))
def test_a_right_runtime_keeps_the_promise(promise: str) -> None:
    finding = look(reference("Right"), promise)
    assert finding.verdict == "kept", finding.evidence


@pytest.mark.parametrize("promise", some(long=LONG))
def test_a_runtime_with_the_fault_is_found_to_break_the_promise(promise: str) -> None:
    finding = look(reference(FAULTS[promise].__name__), promise)
    assert finding.verdict == "broken", finding.evidence


@pytest.mark.parametrize("promise", some(long=set(PROBES) - QUICK))
def test_holdfast_keeps_the_promise(promise: str) -> None:
    finding = look(target_of("holdfast", say=print), promise)
    assert finding.verdict == ("broken" if promise in KNOWN else "kept"), finding.evidence


def test_what_is_broken_is_tried_again_and_each_try_is_shown() -> None:
    finding = look(reference("TranscriptValid"), "transcript valid", times=3)
    assert finding.verdict == "broken"
    assert len(finding.evidence) == 3


def test_an_adapter_that_does_not_start_is_no_broken_promise() -> None:
    finding = look(reference("Missing"), "many at once")
    assert finding.verdict == "could not run"
    assert "Missing" in finding.evidence[0]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("OtherShape", "transcript returned"),
        ("NoJson", "transcript returned a value that JSON cannot express"),
        ("Garbles", "into the pipe"),
        ("Exits", "exit code 3"),
        ("HasHalf", "HasHalf has no live, inbox"),
    ],
)
def test_what_an_adapter_does_wrong_is_said_at_once_and_is_no_broken_promise(name: str, word: str) -> None:
    finding = look(reference(name), "many at once")
    assert finding.verdict == "could not run"
    assert word in finding.evidence[0]


@pytest.mark.parametrize(
    ("name", "promise", "word"),
    [
        ("OnlyMarks", "transcript valid", "called the model again"),
        ("OnlyMarks", "cancel stays in its session", "the cancelled run itself continues"),
        ("RefusesAll", "one run at a time", "no message was taken"),
    ],
)
def test_a_runtime_that_does_nothing_keeps_no_promise_by_that(
    name: str, promise: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.proof.check.probes._IDLE_S", 1.0)
    monkeypatch.setattr("holdfast.proof.check.probes._ANSWER_S", 4.0)
    finding = look(reference(name), promise)
    assert finding.verdict == "could not run", finding.evidence
    assert word in finding.evidence[0]


def test_a_call_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.proof.check.subject.LIMIT_S", 0.5)
    finding = look(reference("HangsInOpen"), "many at once")
    assert finding.verdict == "could not run"
    assert finding.evidence == ("open did not return in 0.5 s",)


def test_an_adapter_that_never_answers_a_plain_question_is_tried_for_one_promise_only() -> None:
    said: list[str] = []
    promises = ["many at once", "no leaks", "next run works"]
    judged = asyncio.run(judge(reference("Exits"), promises=promises, times=2, progress=said.append))
    assert [one.verdict for one in judged.findings] == ["could not run"] * 3
    assert [len(one.evidence) for one in judged.findings] == [2, 1, 1]
    assert judged.findings[2].evidence[0].startswith("not tried again: ")
    assert len(said) == 3


def test_every_framework_has_an_adapter_with_all_methods() -> None:
    methods = {name for name in vars(kit.Adapter) if not name.startswith("_")}
    for framework in FRAMEWORKS.values():
        file, _, name = framework.adapter.partition(":")
        text = (Path(kit.__file__).parent / "adapters" / file).read_text()
        assert f"class {name}:" in text
        assert not {method for method in methods if f"async def {method}(" not in text}


def test_the_kit_and_the_adapters_load_without_anything_but_the_standard_library() -> None:
    folder = Path(kit.__file__).parent
    for file in (folder / "kit.py", *sorted((folder / "adapters").glob("*.py"))):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({str(file)!r})"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_every_probe_says_its_promise_in_words() -> None:
    assert all(probe.__doc__ and probe.__doc__.strip().endswith(".") for probe in PROBES.values())
    assert set(FAULTS) == set(PROBES)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", [name for name, framework in FRAMEWORKS.items() if framework.packages])
def test_the_frameworks_can_be_judged(name: str) -> None:
    try:
        target = target_of(name, say=print)
    except ConfigurationError as error:
        pytest.skip(str(error))
    judged = asyncio.run(judge(target, times=1))
    assert judged.versions
    assert judged.has("kept"), judged.findings

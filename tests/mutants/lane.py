"""Puts each known fault back, one at a time, into a copy of the tree, and sees whether a test goes red.

``make mutants`` runs it, and ``make nightly`` does. It fails when a mutant survives, hangs, cannot be applied or breaks
the import; and when a test that caught a mutant fails on the unharmed product as well. The table goes to
``docs/explanation/mutants.md``, and who caught what to ``witnesses.json``: that test is asked first the next time, and
all of the mutant's tests only if it sees nothing any more.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant, NotApplicable

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "mutants.md"
WITNESSES = Path(__file__).with_name("witnesses.json")
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
COPIED = ("src", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "README.md", "Makefile", "requirements")
RUN_S = 120.0
TEST_S = 100.0
"""A test that takes longer counts as hung, which catches nothing: a test that expects an end has a bound of its own."""


class Report(TypedDict):
    """What `tests.mutants.witness` writes: the tests that failed, and how many passed."""

    failed: list[dict[str, str]]
    passed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one mutant: ``caught``, ``survived``, ``hung`` or ``broken``."""

    mutant: Mutant
    outcome: str
    test: str = ""
    why: str = ""
    seconds: float = 0.0


class Copy:
    """A copy of the tree, in which one mutant lives at a time.

    Parameters:
        folder: where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder
        ignored = shutil.ignore_patterns("__pycache__", "_build", "*.db*", ".hypothesis")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignored)
            elif source.exists():
                shutil.copy2(source, folder / name)

    def run(
        self, tests: Sequence[str], *, limit_s: float, stop_at_first: bool = True
    ) -> tuple[int | None, Report, str]:
        """Run these tests on the copy: pytest's exit code (None: killed at ``limit_s``), its report, and its output."""
        report = self.root / "report.json"
        report.unlink(missing_ok=True)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(self.root / "src"), str(self.root))),
            "MUTANTS_COPY": str(self.root),
            "MUTANTS_REPORT": str(report),
            "MUTANTS_TEST_S": str(TEST_S),
        }
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "tests.mutants.witness"]
        command += [*(word for name in ("cacheprovider", "xdist", "frontrun") for word in ("-p", f"no:{name}"))]
        command += [f"--timeout={TEST_S:g}", *(["-x"] if stop_at_first else []), *tests]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            code: int | None = None
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _kill_group(process)
            output.seek(0)
            text = output.read()
        found: Report = {"failed": [], "passed": 0}
        if report.exists():
            found = json.loads(report.read_text("utf-8"))
        return code, found, text

    def judge(self, mutant: Mutant, witness: str | None = None) -> Verdict:
        """Put the fault in, run its tests, take it out.

        Parameters:
            mutant: the fault.
            witness: the test that saw it before; if it does so again, no other is run.
        """
        try:
            before = mutant.put_into(self.root)
        except NotApplicable as error:
            return Verdict(mutant=mutant, outcome="broken", why=str(error))
        try:
            if witness is not None and (verdict := self._try(mutant, (witness,))).outcome == "caught":
                return verdict
            return self._try(mutant, mutant.tests)
        finally:
            mutant.take_out_of(self.root, before)

    def _try(self, mutant: Mutant, tests: Sequence[str]) -> Verdict:
        began = time.monotonic()
        code, report, text = self.run(tests, limit_s=RUN_S)
        seconds = time.monotonic() - began
        failed = [entry for entry in report["failed"] if entry["how"] == "failed"]
        if code == 1 and failed:
            test, why = failed[0]["test"], failed[0]["why"]
            return Verdict(mutant=mutant, outcome="caught", test=test, why=why, seconds=seconds)
        tail = "\n".join(text.splitlines()[-15:])
        if code is None or report["failed"]:
            return Verdict(mutant=mutant, outcome="hung", why=tail, seconds=seconds)
        if code == 0:
            return Verdict(mutant=mutant, outcome="survived", why=f"{report['passed']} tests passed", seconds=seconds)
        return Verdict(mutant=mutant, outcome="broken", why=tail, seconds=seconds)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a run; its own children have the group of the run, or a reaper of ours above them."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def judge_all(
    mutants: Sequence[Mutant], *, jobs: int, folder: Path, witnesses: Mapping[str, str]
) -> tuple[list[Verdict], list[str]]:
    """All verdicts, in the order of the list, and the catching tests that fail without a mutant too."""
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for number in range(jobs):
        copies.put(Copy(folder / f"copy-{number}"))

    def judge(mutant: Mutant) -> Verdict:
        copy = copies.get()
        try:
            return copy.judge(mutant, witnesses.get(mutant.name))
        finally:
            copies.put(copy)

    def failing(tests: Sequence[str]) -> list[str]:
        copy = copies.get()
        try:
            code, report, text = copy.run(tests, limit_s=RUN_S * 10, stop_at_first=False)
        finally:
            copies.put(copy)
        found = [entry["test"] for entry in report["failed"]]
        return found if found or code == 0 else [f"(the run ended with {code})\n{text[-2000:]}"]

    verdicts: dict[str, Verdict] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(judge, mutant) for mutant in mutants]):
            verdict = done.result()
            verdicts[verdict.mutant.name] = verdict
            print(f"{verdict.outcome:9} {verdict.seconds:6.1f} s  {verdict.mutant.name}  {verdict.test}", flush=True)
            print("          " + verdict.why.replace("\n", "\n          "), flush=True)
        ordered = [verdicts[mutant.name] for mutant in mutants]
        caught_by = sorted({verdict.test for verdict in ordered if verdict.outcome == "caught"})
        print(f"the {len(caught_by)} tests that caught them, on the unharmed product", flush=True)
        shares = [share for number in range(jobs) if (share := caught_by[number::jobs])]
        unsound = [test for tests in pool.map(failing, shares) for test in tests]
    return ordered, unsound


def _commit() -> str:
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--", "src"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        return "a tree without git"
    return f"commit {head.stdout.strip()}{' and changes that were not committed' if dirty else ''}"


def table(verdicts: Iterable[Verdict], *, at: datetime, commit: str) -> str:
    """The generated part of the page."""
    verdicts = list(verdicts)
    caught = sum(verdict.outcome == "caught" for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    lines = [
        f"{at:%Y-%m-%d %H:%M} UTC, {commit}, Python {sys.version.split()[0]}: {len(verdicts)} mutants, "
        f"{caught} caught, {len(verdicts) - caught} not; {seconds:,.0f} s of testing.",
        "",
        "| mutant | of | what it breaks | caught by | s |",
        "|---|---|---|---|---:|",
    ]
    for verdict in verdicts:
        mutant = verdict.mutant
        path, _, name = verdict.test.partition("::")
        by = (
            f"`{path.removeprefix('tests/')}` {_code(name)}"
            if verdict.outcome == "caught"
            else f"**{verdict.outcome}**"
        )
        breaks = mutant.breaks.replace("|", "\\|")
        lines.append(f"| {mutant.name} | {mutant.of} | {breaks} | {by} | {verdict.seconds:.1f} |")
    return "\n".join(lines)


def _code(name: str) -> str:
    return f"`{name.replace('|', '/')}`"


def write_page(text: str) -> None:
    """Put the table between the marks of the page."""
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", "utf-8")


def _part(text: str) -> tuple[int, int]:
    """Parse ``N/OF``."""
    number, _, parts = text.partition("/")
    if not 1 <= int(number) <= int(parts):
        raise ValueError(text)
    return int(number), int(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 when something is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", action="append", default=[], help="a part of a name; may be given several times")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--check", action="store_true", help="write neither the page nor the list of who caught what")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="N/OF", help="only this part of the list")
    parser.add_argument("--list", action="store_true", help="only show the list")
    options = parser.parse_args(arguments)
    number, parts = options.part
    wanted = [m for m in MUTANTS if not options.only or any(part in m.name for part in options.only)]
    chosen = wanted[number - 1 :: parts]
    if options.list or not chosen:
        for mutant in chosen:
            print(f"{mutant.of:7} {mutant.name}: {mutant.breaks}")
        return 0 if chosen else 2
    began = datetime.now(UTC)
    commit = _commit()
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-", ignore_cleanup_errors=True) as folder:
        witnesses = json.loads(WITNESSES.read_text("utf-8")) if WITNESSES.exists() else {}
        verdicts, unsound = judge_all(chosen, jobs=options.jobs, folder=Path(folder), witnesses=witnesses)
    missed = [verdict for verdict in verdicts if verdict.outcome != "caught"]
    print(f"{len(verdicts)} mutants: {len(verdicts) - len(missed)} caught, {len(missed)} not")
    for verdict in missed:
        print(f"  {verdict.outcome}: {verdict.mutant.name}")
    for test in unsound:
        print(f"  fails on the unharmed product too: {test}")
    if chosen == list(MUTANTS) and not options.only and not options.check:
        write_page(table(verdicts, at=began, commit=commit))
        caught = {verdict.mutant.name: verdict.test for verdict in verdicts if verdict.outcome == "caught"}
        WITNESSES.write_text(json.dumps(caught, indent=1, sort_keys=True) + "\n", "utf-8")
        print(f"written to {PAGE.relative_to(ROOT)}")
    return 1 if missed or unsound else 0

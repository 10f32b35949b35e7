"""The pytest plugin: explored tests, replay files, and detectors for leaks, blocking calls and the network.

Tests that use none of these markers and ini options are not affected.

- ``@pytest.mark.explore(schedules=…, chooser=…)`` runs an async test under the explorer.
- ``@pytest.mark.no_leaks``, ``no_blocking`` and ``no_network`` each run a detector for one test. The ini options
  ``holdfast_no_leaks``, ``holdfast_no_blocking`` and ``holdfast_no_network`` run these detectors for every test.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from holdfast.testing.explorer.explore import ExplorationReport
    from holdfast.testing.explorer.replay import Replay

__all__: list[str] = []

_KINDS = ("tasks", "threads", "fds", "processes")
_MARKERS = (
    "explore(schedules=300, chooser='random'|'pct'|'exhaustive', seed=0, depth=3, tasks='ordinary'|'eager'|'both', "
    "late_s=0.0, max_steps=20000, shrink=True): run this async test under many schedules (holdfast.testing)",
    "no_leaks(but=(), repeat=0): fail when the test leaves tasks, threads, fds or processes behind; but=('threads',) "
    "allows some; repeat=5 runs it five times and fails when its memory grows every time",
    "no_blocking: refuse calls that block a running event loop",
    "no_network: refuse connections to other machines",
)
_SWITCHES = ("no_leaks", "no_blocking", "no_network")
_BOTH = "explored_tasks"
_FEWEST = 3
"""The fewest repetitions that show whether a test's memory grows."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line and configuration options."""
    group = parser.getgroup("holdfast")
    group.addoption("--explore-replay", metavar="FILE", help="run only the schedule, and the test, of this replay file")
    group.addoption(
        "--explore-schedules", metavar="N", type=int, help="schedules for each explored test, overriding its marker"
    )
    for name in _SWITCHES:
        parser.addini(f"holdfast_{name}", f"mark every test {name}", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and load the replay file if ``--explore-replay`` names one."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    path = config.getoption("explore_replay")
    if path:
        from holdfast.testing.explorer.replay import Replay

        try:
            config.stash[_REPLAY] = Replay.load(path)
        except (OSError, ValueError) as error:
            raise pytest.UsageError(f"--explore-replay: {error}") from error


_REPLAY = pytest.StashKey["Replay"]()
_BEFORE = pytest.StashKey[Any]()
"""The `Inventory` that was taken before the test."""


# Explored tests


def _options_of(item: pytest.Item) -> dict[str, Any] | None:
    """Return the options of a test's ``explore`` marker, or None if the test is not marked."""
    marker = item.get_closest_marker("explore")
    if marker is None:
        return None
    options = dict(marker.kwargs)
    known = ("schedules", "chooser", "seed", "depth", "tasks", "late_s", "max_steps", "shrink")
    wrong = [*map(repr, marker.args), *(name for name in options if name not in known)]
    if wrong:
        raise pytest.UsageError(
            f"{item.nodeid}: explore() does not accept {', '.join(wrong)}; use the keyword arguments {known}"
        )
    if options.get("tasks", "both") not in ("ordinary", "eager", "both"):
        raise pytest.UsageError(
            f"{item.nodeid}: tasks is {options['tasks']!r}; the marker takes 'ordinary', 'eager' or 'both'"
        )
    if not inspect.iscoroutinefunction(getattr(item, "obj", None)):
        raise pytest.UsageError(
            f"{item.nodeid} is marked explore, but is not an `async def`; make it one, "
            "or call holdfast.testing.explore in it"
        )
    return options


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test that is marked ``tasks='both'``: it runs once with ordinary and once with eager tasks."""
    marker = metafunc.definition.get_closest_marker("explore")
    if marker is not None and marker.kwargs.get("tasks") == "both":
        metafunc.fixturenames.append(_BOTH)
        metafunc.parametrize(_BOTH, ["ordinary", "eager"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Report invalid markers before any test runs; if a replay file is given, select only the test it belongs to."""
    for item in items:
        _options_of(item)
        _check_no_leaks(item)
    recorded = config.stash.get(_REPLAY, None)
    if recorded is None:
        return
    chosen = [item for item in items if item.nodeid == recorded.test]
    if not chosen:
        raise pytest.UsageError(
            f"--explore-replay: the file belongs to {recorded.test}, which was not collected; "
            "include this test in the pytest command"
        )
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked ``explore`` or ``no_leaks(repeat=…)``; leave all other tests to pytest."""
    __tracebackhide__ = True
    options = _options_of(pyfuncitem)
    if options is None:
        return _repeated(pyfuncitem)
    from holdfast.testing.explorer.explore import explore
    from holdfast.testing.explorer.failures import ScheduleFailure

    config = pyfuncitem.config
    if options.get("tasks") == "both":
        options["tasks"] = pyfuncitem.callspec.params[_BOTH]
    if (schedules := config.getoption("explore_schedules")) is not None:
        options["schedules"] = schedules
    test, values = pyfuncitem.obj, _values(pyfuncitem)
    try:
        report = explore(lambda: test(**values), replay=config.stash.get(_REPLAY, None), **options)
    except ScheduleFailure as failure:
        if failure.recorded is not None and failure.kind not in ("nondeterminism", "not_explorable"):
            failure.add_note(_keep(config, replace(failure.recorded, test=pyfuncitem.nodeid)))
        raise
    pyfuncitem.user_properties.append(("explored", _figures(report)))
    return True


def _values(pyfuncitem: pytest.Function) -> dict[str, Any]:
    """Return the values of the fixtures and parameters that the test function takes as arguments."""
    named = inspect.signature(pyfuncitem.obj).parameters.values()
    return {
        one.name: pyfuncitem.funcargs[one.name]
        for one in named
        if one.default is one.empty and one.name in pyfuncitem.funcargs
    }


def _keep(config: pytest.Config, recorded: Replay) -> str:
    """Write the replay file, and return a note with the command that replays the failure."""
    cache = getattr(config, "cache", None)
    if cache is None:
        return "no replay file: pytest's cache is off (-p cacheprovider turns it on)"
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in recorded.test)[-150:]
    path = recorded.save(Path(cache.mkdir("explore")) / f"{name}.json")
    try:
        shown = path.relative_to(Path.cwd())
    except ValueError:
        shown = path
    return f"to see it again: pytest '{recorded.test}' --explore-replay '{shown}'"


def _figures(report: ExplorationReport) -> dict[str, Any]:
    return {
        "schedules": report.schedules,
        "distinct": report.distinct,
        "exhausted": report.exhausted,
        "states": report.states,
        "choices": report.choices,
        "elapsed_s": report.elapsed_s,
    }


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a summary of all explored tests and, with ``-v``, a line for each of them."""
    found = [
        (report.nodeid, value)
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
        if name == "explored"
    ]
    if not found:
        return

    def line(figures: list[dict[str, Any]]) -> str:
        schedules, distinct, states, elapsed_s = (
            sum(one[name] for one in figures) for name in ("schedules", "distinct", "states", "elapsed_s")
        )
        exhausted = sum(one["exhausted"] for one in figures)
        ends = f"; all there are in {exhausted} of {len(figures)} tests" if exhausted else ""
        return (
            f"{schedules:,} schedules ({distinct:,} different{ends}), {states:,} states, "
            f"{schedules / max(elapsed_s, 1e-9):,.0f} schedules/s"
        )

    if terminalreporter.config.get_verbosity() > 0:
        terminalreporter.section("explored")
        for nodeid, figures in found:
            terminalreporter.line(f"{nodeid}: {line([figures])}")
    tests = "1 test" if len(found) == 1 else f"{len(found)} tests"
    terminalreporter.line(f"explored {tests}: {line([figures for _, figures in found])}")


# Detectors


def _is_on(request: pytest.FixtureRequest, name: str) -> bool:
    return request.node.get_closest_marker(name) is not None or bool(request.config.getini(f"holdfast_{name}"))


@pytest.fixture(autouse=True)
def _holdfast_watch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the detectors requested for this test; resources of fixtures with a wider scope do not count as leaks."""
    wanted = [name for name in _SWITCHES if _is_on(request, name)]
    if not wanted:
        yield
        return
    refused: list[str] = []
    blocked: list[str] = []
    with ExitStack() as stack:
        before = None
        unended: list[str] = []
        if "no_leaks" in wanted:
            from holdfast.testing.detectors.leaks import Inventory, left_to_runners

            kinds = _looked_at(request)
            before = request.config.stash[_BEFORE] = Inventory(kinds)
            stack.callback(request.config.stash.__delitem__, _BEFORE)
            if "tasks" in kinds:
                unended = stack.enter_context(left_to_runners())
        if "no_network" in wanted:
            from holdfast.testing.detectors.guards import network_refused

            refused = stack.enter_context(network_refused())
        if "no_blocking" in wanted:
            from holdfast.testing.detectors.guards import blocking_refused

            blocked = stack.enter_context(blocking_refused())
        yield
        stack.close()
        found = [*refused, *blocked]
        if before is not None:
            found += _told_leaks([*unended, *before.left_since()])
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Exclude resources of fixtures with a wider scope from a test's leaks."""
    before = None if fixturedef.scope == "function" else request.config.stash.get(_BEFORE, None)
    if before is None:
        return (yield)
    with before.passed_over():
        return (yield)


def _told_leaks(left: list[str]) -> list[str]:
    """Return a line for each leak, followed by a line with the remedy; an empty list if nothing leaked."""
    if not left:
        return []
    kinds = tuple(kind for kind in _KINDS if any(one.startswith(f"{kind}: ") for one in left))
    return [
        *(f"left behind: {one}" for one in left),
        f"end it in the test or in one of its fixtures, or allow it with no_leaks(but={kinds!r})",
    ]


def _looked_at(request: pytest.FixtureRequest) -> list[Any]:
    marker = request.node.get_closest_marker("no_leaks")
    but = marker.kwargs.get("but", ()) if marker is not None else ()
    return [name for name in _KINDS if name not in but]


def _check_no_leaks(item: pytest.Item) -> None:
    """Raise `pytest.UsageError` if the test's ``no_leaks`` marker is invalid."""
    marker = item.get_closest_marker("no_leaks")
    if marker is None:
        return
    wrong = [*map(repr, marker.args), *(name for name in marker.kwargs if name not in ("but", "repeat"))]
    if wrong:
        raise pytest.UsageError(f"{item.nodeid}: no_leaks() does not accept {', '.join(wrong)}; use but= and repeat=")
    but, repeat = marker.kwargs.get("but", ()), marker.kwargs.get("repeat", 0)
    if isinstance(but, str) or [name for name in but if name not in _KINDS]:
        raise pytest.UsageError(f"{item.nodeid}: no_leaks: but is {but!r}; use a tuple of names from {_KINDS}")
    if not isinstance(repeat, int) or repeat < 0 or 0 < repeat < _FEWEST:
        raise pytest.UsageError(
            f"{item.nodeid}: no_leaks: repeat is {repeat!r}; it must be a whole number, {_FEWEST} or more"
        )
    if repeat and (inspect.iscoroutinefunction(getattr(item, "obj", None))):
        raise pytest.UsageError(
            f"{item.nodeid}: no_leaks(repeat=…) does not support async tests; "
            "write a plain function that calls asyncio.run(…)"
        )


def _repeated(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test repeatedly if it is marked ``no_leaks(repeat=…)``. The test's fixtures are set up only once."""
    marker = pyfuncitem.get_closest_marker("no_leaks")
    repeat = marker.kwargs.get("repeat", 0) if marker is not None else 0
    if not repeat:
        return None
    from holdfast.testing.detectors.memory import grown

    test, values = pyfuncitem.obj, _values(pyfuncitem)
    if found := grown(lambda: test(**values), repeat=repeat):
        pytest.fail("\n".join(f"memory grows: {one}" for one in found), pytrace=False)
    return True

"""The agent that a word on the command line names: files, modules, names in them, and what is wrong with the rest."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli.agent_spec import find_agent, log_import_failure
from holdfast.errors import ConfigurationError, MissingExtra
from holdfast.tools.files.workspace import Workspace

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write files into a folder of the test's own, which is the current folder; their modules are forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.startswith("spec_")]:
        del sys.modules[name]


def refused(spec: str) -> tuple[str, str]:
    with pytest.raises(ConfigurationError) as caught:
        find_agent(spec)
    return caught.value.message, caught.value.hint or ""


HELLO = "async def agent(run): yield 'hi'\n"


@pytest.mark.parametrize(
    "spec", ["spec_hello", "spec_hello.py", "spec_hello:agent", "./spec_hello.py:agent", "./spec_hello"]
)
def test_file_and_module_name_the_same_agent(write: Write, spec: str) -> None:
    write(spec_hello=HELLO)
    assert find_agent(spec).name == "agent"


@pytest.mark.parametrize("spec", ["spec_folder/spec_hello.py", "spec_folder/spec_hello.py:agent"])
def test_file_in_a_folder_imports_its_neighbours(write: Write, spec: str) -> None:
    write(spec_folder__spec_hello="import spec_other\n" + HELLO, spec_folder__spec_other="")
    assert find_agent(spec).name == "agent"


def test_file_in_a_package_may_import_relatively(write: Write, tmp_path: Path) -> None:
    write(spec_pkg__spec_hello="from . import spec_other\n" + HELLO, spec_pkg__spec_other="")
    (tmp_path / "spec_pkg" / "__init__.py").write_text("")
    assert find_agent("spec_pkg/spec_hello.py").name == "agent"
    assert find_agent("spec_pkg.spec_hello:agent").name == "agent"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("async def other(run): ...\nasync def agent(run): ...\n", "agent"),
        ("async def app(run): ...\nasync def other(run): ...\n", "app"),
        ("async def only(run): ...\n", "only"),
        ("def helper(x): ...\nasync def only(run): ...\n", "only"),
        ("import holdfast\nasync def build(target): ...\nasync def only(work: holdfast.Run): ...\n", "only"),
        ("async def build(target): ...\nasync def only(run): ...\n", "only"),
        ("def only(run): ...\ndef two(a, b): ...\n", "only"),
        ("from holdfast import agent\n\n@agent\nasync def only(run): ...\n", "only"),
        ("from holdfast import Agent\nasync def work(run): ...\nmine = Agent(name='shop', work=work)\n", "shop"),
        ("from json import dumps\nagent = lambda run: 'hi'\n", "agent"),
        ("class Shop:\n    async def __call__(self, run): ...\nagent = Shop()\n", "agent"),
        ("import functools\nasync def work(run, x): ...\nagent = functools.partial(work, x=1)\n", "agent"),
    ],
)
def test_module_alone_names_its_agent(write: Write, text: str, name: str) -> None:
    write(spec_one=text)
    assert find_agent("spec_one").name == name


def test_object_without_a_name_gets_the_name_that_was_given(write: Write) -> None:
    write(spec_many="class Shop:\n    def __call__(self, run): ...\nfirst = lambda run: 'hi'\nsecond = Shop()\n")
    assert [find_agent(f"spec_many:{name}").name for name in ("first", "second")] == ["first", "second"]


def test_several_agents_are_listed_as_they_can_be_typed(write: Write) -> None:
    write(spec_two="async def shout(run): ...\nasync def spell(run): ...\n")
    assert refused("spec_two.py") == (
        "spec_two.py defines several agents",
        "choose one: spec_two:shout, spec_two:spell",
    )
    write(spec_lot="".join(f"async def a{n}(run): ...\n" for n in range(13)))
    assert refused("spec_lot")[1].endswith("spec_lot:a9, … and 3 more")


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("spec_hallo.py", "no file 'spec_hallo.py' here", "did you mean spec_hello.py?"),
        ("spec_hallo", "no module named 'spec_hallo'", "did you mean spec_hello?"),
        ("nowhere/x.py", "no file 'x.py' in nowhere", "this folder is"),
        (".", "'.' is a folder", "name a Python file"),
        ("./", "'./' is a folder", "name a Python file"),
        ("notes.txt", "'notes.txt' is not a Python file", ".py"),
        (":agent", "':agent' does not name an agent", "FILE.py"),
        ("", "'' does not name an agent", "FILE.py"),
        ("json.py", "json.py cannot be imported: 'json' is the name of another module", "rename the file"),
        ("spec_hello:agnet", "spec_hello has no 'agnet'", "did you mean 'agent'? agents there: agent"),
        ("spec_odd:missing", "spec_odd has no 'missing'", "agents there: none"),
        ("spec_odd", "spec_odd defines no agent", "async def agent(run)"),
        ("spec_odd:Shop", "spec_odd:Shop: the class Shop is not an agent", "make an instance: agent = Shop()"),
        ("spec_odd:x", "spec_odd:x: a value of type int is not an agent", "async def agent(run)"),
        ("spec_odd:two", "spec_odd:two: two cannot be called with one argument, the run", "async def agent(run)"),
        ("spec_odd:agent", "spec_odd:agent is the decorator, not an agent", "agents there: none"),
        ("spec_odd:json", "spec_odd:json: a value of type module is not an agent", "async def agent(run)"),
        ("..x", "no file '..x.py' here", "this folder is"),
        ("nosuch.py", "no file 'nosuch.py' here", "this folder is"),
        ("spec_hello.agent", "no module named 'spec_hello.agent'", "did you mean spec_hello:agent?"),
        ("spec_hello.other", "no module named 'spec_hello.other'", "named after a colon: spec_hello:agent"),
        ("spec_only/", "'spec_only/' is a folder", "name a Python file in it: spec_only/spec_inner.py"),
        ("spec_only", "spec_only defines no agent", "name a Python file in it: spec_only/spec_inner.py"),
        ("os", "os defines no agent", "name its file or module: hello.py, hello:agent"),
        ("spec_plain", "spec_plain defines no agent", "async def agent(run)"),
    ],
)
def test_wrong_spec_is_told_what_is_wrong_and_what_to_type(
    write: Write, tmp_path: Path, spec: str, message: str, hint: str
) -> None:
    write(spec_hello=HELLO, json="", inst=HELLO, spec_only__spec_inner=HELLO)
    write(spec_plain="def double(x): ...\nasync def fetch(url: str): ...\n")
    write(spec_odd="import json\nfrom holdfast import agent\nclass Shop: ...\nx = 1\nasync def two(a, b): ...\n")
    (tmp_path / "notes.txt").write_text("x")
    found = refused(spec)
    assert message in found[0]
    assert hint in found[1]
    assert "0x" not in "".join(found)


def test_a_syntax_error_names_its_place_once(write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(spec_broken="async def agent(run)\n    pass\n")
    with pytest.raises(ConfigurationError) as caught:
        find_agent("spec_broken")
    assert caught.value.message == "cannot import spec_broken: spec_broken.py, line 1: SyntaxError: expected ':'"
    log_import_failure(caught.value)
    assert caplog.records == [], "the message has all of it"


def test_a_workspace_that_cannot_be_created_is_told_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="unusable workspace") as caught:
        Workspace(tmp_path / "file" / "work")
    log_import_failure(caught.value)
    assert caplog.records == []


def test_a_missing_extra_is_told_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MissingExtra) as caught:
        try:
            raise ModuleNotFoundError("No module named 'psycopg'")
        except ImportError as error:
            raise MissingExtra("the PostgreSQL store", extra="postgres") from error
    log_import_failure(caught.value)
    assert caplog.records == [], "the message has all of it"

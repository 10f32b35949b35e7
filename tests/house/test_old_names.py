"""An old name of a setting, variable, flag, command or path is refused with the new one; none is an alias."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast import old_names
from holdfast.cli import app
from holdfast.errors import ConfigurationError, InvalidRequest
from holdfast.settings import OTHER_VARIABLES, Settings, describe, load_settings
from tests.server.live import GUARD_S, Live, live, served

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"


def variable(setting: str) -> str:
    return f"HOLDFAST_{setting.upper()}"


def said(*arguments: str) -> tuple[int, str]:
    """What a command exits with and prints."""
    ended = CliRunner().invoke(app, list(arguments))
    return ended.exit_code, re.sub(r"\s+", " ", ended.output)


def test_new_names_exist_and_old_ones_do_not() -> None:
    settings = set(Settings.__struct_fields__)
    assert not settings & set(old_names.SETTINGS)
    assert set(old_names.SETTINGS.values()) <= settings


@pytest.mark.parametrize(("old", "new"), old_names.SETTINGS.items())
def test_an_old_setting_is_refused_with_its_new_name(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{variable(old)}.*{variable(new)}"):
        load_settings(environ={variable(old): "1"}, folder=tmp_path)
    with pytest.raises(ConfigurationError, match=f"{old}.*the command line.*{new}"):
        load_settings({old: 1}, environ={}, folder=tmp_path)
    (tmp_path / "holdfast.toml").write_text(f"{old} = 1\n")
    with pytest.raises(ConfigurationError, match=f"{old}.*holdfast.toml.*{new}"):
        load_settings(environ={}, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("HOLDFAST_PROT", "HOLDFAST_PORT"),
        ("HOLDFAST_MAX_RUN", "HOLDFAST_MAX_RUNS"),
        ("HOLDFAST_SERVICE_OF_OURS", "settings reference"),
        ("HOLDFAST_X", "settings reference"),
        ("HOLDFAST_", "settings reference"),
        ("HOLDFAST_URLS", "HOLDFAST_URL"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused(name: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(environ={name: "1"}, folder=tmp_path)
    assert name in str(caught.value)
    assert hint in caught.value.hint


def test_variables_of_other_programs_and_of_the_client_are_left_alone(tmp_path: Path) -> None:
    environ = dict.fromkeys(OTHER_VARIABLES - {"HOLDFAST_CONFIG"}, "x") | {"HOLDFASTER": "1", "holdfast_port": "x"}
    assert load_settings(environ=environ, folder=tmp_path).port == Settings().port


def test_every_variable_that_the_code_reads_is_known() -> None:
    known = {row.variable for row in describe()} | OTHER_VARIABLES
    named = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"""["'](HOLDFAST_[A-Z_]*[A-Z])["']""", path.read_text("utf-8"))
    }
    assert "HOLDFAST_FAILPOINT" in named
    assert named <= known


@pytest.mark.parametrize(("old", "new"), old_names.COMMANDS.items())
def test_an_old_command_is_refused_with_its_new_name(old: str, new: str) -> None:
    assert said(new, "--help")[0] == 0
    code, text = said(old, "other")
    assert code == 2
    assert f"the command {old!r} was renamed; use {new!r}" in text


@pytest.mark.parametrize(("old", "new"), old_names.COMMANDS.items())
def test_an_old_command_of_the_chat_is_refused_with_its_new_name(old: str, new: str) -> None:
    from holdfast.cli.chat_commands import command_of

    assert command_of(f"/{new} other") is not None
    with pytest.raises(InvalidRequest) as caught:
        command_of(f"/{old} other")
    assert f"/{new}" in caught.value.hint


@pytest.mark.parametrize(("command", "old", "new"), [(*key, new) for key, new in old_names.FLAGS.items()])
@pytest.mark.parametrize("value", [" 1", "=1"])
def test_an_old_flag_is_refused_with_its_new_name(command: str, old: str, new: str, value: str) -> None:
    assert new in said(command, "--help")[1]
    code, text = said(command, *f"{old}{value}".split())
    assert code == 2
    assert f"the option {old} was renamed; use {new}" in text


def test_text_after_two_dashes_is_no_flag() -> None:
    assert old_names.renamed_flag("serve", ["--drain=1"]) == ("--drain", "--drain-timeout")
    assert old_names.renamed_flag("serve", ["--", "--drain"]) is None
    assert old_names.renamed_flag("send", ["--drain"]) is None


def test_an_old_path_is_refused_with_its_new_name() -> None:
    async def scenario(server: Live) -> None:
        for old, new in old_names.ROUTES.items():
            answer = await server.http.post(old.replace("{key}", "bob"), json={"key": "other"})
            error: dict[str, Any] = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "unknown_route")
            assert new in error["hint"]
        other = await server.http.post("/v1/sessions/bob/nothing")
        assert (other.status_code, "renamed" in other.text) == (404, False)

    served(scenario)


def test_old_metrics_are_gone_and_the_new_ones_are_there() -> None:
    async def scenario(server: Live) -> None:
        text = (await server.http.get("/metrics")).text
        for old, new in old_names.METRICS.items():
            assert re.search(rf"^{new}\b", text, re.MULTILINE), new
            assert not re.search(rf"^{old}\b", text, re.MULTILINE), old

    served(scenario)


def test_old_fields_of_responses_are_gone_and_the_new_ones_are_there() -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live() as server:
            statistics = (await server.http.get("/v1/server")).json()["statistics"]
            report = (await server.http.post("/v1/drain", json={"deadline_s": 0})).json()
        for old, new in old_names.RESPONSE_FIELDS.items():
            assert new in {*statistics, *report}
            assert old not in {*statistics, *report}

    asyncio.run(main())


def test_the_changelog_has_every_pair() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    tables = (old_names.SETTINGS, old_names.COMMANDS, old_names.METRICS, old_names.RESPONSE_FIELDS, old_names.ROUTES)
    pairs = [pair for table in tables for pair in table.items()]
    pairs += [(flag, new) for (_, flag), new in old_names.FLAGS.items()]
    missing = [(old, new) for old, new in pairs if not re.search(rf"{re.escape(old)}`.*\|.*{re.escape(new)}`", text)]
    assert missing == []

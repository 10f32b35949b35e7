"""Hints of the command line name commands of it, not the HTTP API or Python."""

from __future__ import annotations

import re
import shlex

import pytest

from holdfast import errors
from holdfast.cli.chat_commands import COMMANDS as SLASH_COMMANDS
from holdfast.cli.commands import COMMANDS
from holdfast.cli.hints import _CHAT, _COMMANDS, command_hint
from holdfast.cli.output import say_error


def by_code(kind: type[errors.HoldfastError] = errors.HoldfastError) -> dict[str, type[errors.HoldfastError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found |= by_code(child)
    return found


@pytest.mark.parametrize("code", sorted({*_COMMANDS, *_CHAT}))
def test_hints_are_for_errors_that_exist_and_name_commands_that_exist(code: str) -> None:
    assert code in by_code()
    for hint in (_COMMANDS.get(code, ""), _CHAT.get(code, "")):
        named = re.findall(r"\bholdfast ([a-z]+)", hint)
        assert set(named) <= set(COMMANDS), named
        assert not re.search(r"\w\(\)|GET |POST |Bearer|agent=|Retry-After", hint), hint


@pytest.mark.parametrize("code", sorted(_CHAT))
def test_hints_of_the_chat_name_slash_commands_that_exist(code: str) -> None:
    named = re.findall(r"(?<![\w/])/([a-z]+)", _CHAT[code])
    assert set(named) <= {*SLASH_COMMANDS, "agent"}


def test_a_hint_names_the_session_as_the_shell_reads_it() -> None:
    hint = command_hint(errors.SessionBusy(), session="it's mine")
    assert shlex.split(hint.rpartition(": ")[2]) == ["holdfast", "interrupt", "-s", "it's mine"]
    assert command_hint(errors.SessionBusy(), session="{x}").endswith("-s '{x}'")


def test_a_hint_lists_the_agents_that_the_server_listed() -> None:
    error = errors.UnknownAgent("unknown agent 'x'", hint="available: agent, demo; name one with the message")
    assert command_hint(error, session="s") == "choose one: --agent NAME (available: agent, demo)"
    assert command_hint(error, session="s", chat=True) == "choose one: /agent NAME (available: agent, demo)"
    gone = errors.SessionAgentMissing("gone", hint="name another (agent=, --agent; available: agent), or use another")
    hint = "continue with another agent: holdfast chat -s s --agent NAME (available: agent); or start a new session: "
    assert command_hint(gone, session="s") == hint + "-s NEW"
    assert "available" not in command_hint(errors.SessionAgentMissing(), session="s")


def test_other_errors_keep_their_hint() -> None:
    assert command_hint(errors.InvalidKey("x"), session="s") == errors.InvalidKey.default_hint
    assert command_hint(errors.SessionBusy(hint="as it is"), session=None) == "as it is", "it would name a session"


def test_json_keeps_the_hint_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    say_error(errors.UnknownQuestion(), as_json=True, session="main")
    assert "GET …/approvals" in capsys.readouterr().err
    say_error(errors.UnknownQuestion(), as_json=False, session="main")
    assert "  list them: holdfast questions -s main\n" in capsys.readouterr().err


def test_an_unreachable_server_has_a_hint_for_python_and_one_for_the_command_line() -> None:
    error = errors.ServerUnreachable("nothing listens there")
    assert "holdfast serve" not in error.hint and "--url" not in error.hint
    assert "holdfast serve" in command_hint(error, session=None)
    lost = errors.ServerUnreachable("lost", hint="the request may have taken effect")
    assert command_hint(lost, session="s") == "the request may have taken effect"


@pytest.mark.parametrize("kind", [errors.UnknownQuestion, errors.NotSupported, errors.UnknownSession])
def test_what_a_slash_command_refuses_is_explained_without_names_of_the_api(kind: type[errors.HoldfastError]) -> None:
    hint = command_hint(kind("refused", hint=kind.default_hint), session="s", chat=True)
    assert hint and not re.search(r"\w\(\)|GET ", hint)

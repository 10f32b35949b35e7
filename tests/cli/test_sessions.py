"""Sessions and their queued messages are deleted and withdrawn from the command line, and logs are shown."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.cli.exit_codes import Exit
from holdfast.cli.stop_progress import announce, progress_line
from holdfast.errors import ServerUnreachable
from holdfast.protocol.messages import TreeNode
from holdfast.testing import run_virtual
from tests.cli.processes import Served, run, served, terminal


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of this module; each uses sessions of its own."""
    with served(tmp_path_factory.mktemp("serve"), HOLDFAST_GRACE_S="30") as running:
        yield running
        assert running.end() == 0


def sessions(server: Served) -> set[str]:
    return {line.split("  ")[0] for line in server.run("ps").stdout.splitlines()[1:]}


def test_rm_deletes_sessions_and_stops_their_work(server: Served) -> None:
    server.run("send", "count a", "-s", "done", "--wait", "60")
    server.run("send", "steps 1000", "-s", "working")
    found = server.run("rm", "done", "working", "--yes")
    assert (found.returncode, found.stderr) == (0, "")
    first, second = found.stdout.splitlines()
    assert first == "deleted done"
    assert second.startswith("deleted working; stopped: ")
    assert not {"done", "working"} & sessions(server)
    server.run("send", "count a", "-s", "as json")
    assert json.loads(server.run("rm", "as json", "-y", "--json").stdout)["session"] == "as json"


def test_rm_deletes_the_others_when_one_does_not_exist(server: Served) -> None:
    server.run("send", "count a", "-s", "there", "--wait", "60")
    found = server.run("rm", "missing", "there", "--yes")
    assert (found.returncode, found.stdout) == (Exit.REFUSED, "deleted there\n")
    assert "missing" in found.stderr


def test_rm_asks_at_a_terminal_and_refuses_to_guess_elsewhere(server: Served) -> None:
    server.run("send", "count a", "-s", "asked", "--wait", "60")
    piped = server.run("rm", "asked")
    assert (piped.returncode, piped.stdout) == (Exit.USAGE, "")
    assert "nothing was deleted" in piped.stderr
    assert "--yes" in piped.stderr
    for typed, code in (("n\n", Exit.REFUSED), ("\x03", -signal.SIGINT), ("\x04", Exit.REFUSED), ("y\n", Exit.OK)):
        assert "asked" in sessions(server)
        with terminal("rm", "asked", folder=server.folder, HOLDFAST_URL=server.url) as screen:
            screen.expect("delete session 'asked' with 1 message? its name is not free for a week; y/n> ")
            screen.type(typed)
            assert screen.end() == code, typed
    assert "asked" not in sessions(server)


def test_withdraw_takes_the_only_queued_message_or_the_one_that_is_named(server: Served) -> None:
    server.run("send", "steps 1000", "-s", "box")
    empty = server.run("withdraw", "-s", "box")
    assert (empty.returncode, "no queued message" in empty.stderr) == (Exit.REFUSED, True)
    first, second = (
        json.loads(server.run("send", f"count {text}", "-s", "box", "--json").stdout)["message_id"] for text in "ab"
    )
    several = server.run("withdraw", "-s", "box")
    assert (several.returncode, several.stdout) == (Exit.USAGE, "")
    assert f'  {first}  "count a"\n  {second}  "count b"' in several.stderr
    named = server.run("withdraw", second, "-s", "box")
    assert (named.returncode, named.stdout) == (0, f'withdrawn: {second} "count b"\n')
    again = server.run("withdraw", second, "-s", "box")
    assert (again.returncode, again.stdout) == (0, f"was already withdrawn: {second}\n")
    only = server.run("withdraw", "-s", "box", "--json")
    assert (only.returncode, json.loads(only.stdout)["message_id"]) == (0, first)
    taken = json.loads(server.run("logs", "-s", "box", "-n", "1000", "--json").stdout.splitlines()[0])["message_id"]
    late = server.run("withdraw", taken, "-s", "box")
    assert (late.returncode, "holdfast interrupt -s box" in late.stderr) == (Exit.REFUSED, True)
    server.run("stop", "-s", "box")


def test_logs_shows_the_newest_events_and_ends(server: Served) -> None:
    server.run("send", "count a", "-s", "log", "--wait", "60")
    every = server.run("logs", "-s", "log", "-n", "1000")
    newest = server.run("logs", "-s", "log", "-n", "2")
    assert newest.stdout.splitlines() == every.stdout.splitlines()[-2:]
    assert every.stdout == server.run("tail", "-s", "log", "-n", "1000", "--no-follow").stdout
    with terminal("logs", "-f", "-s", "log", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect("message.settled")
        server.run("send", "count b", "-s", "log")
        screen.expect("count b")
        screen.type("\x03")
        assert screen.end() == Exit.INTERRUPTED


def test_an_interrupt_that_takes_long_tells_what_it_waits_for(server: Served) -> None:
    server.run("send", "resist 4", "-s", "slow")
    with terminal("tail", "-s", "slow", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect("Interrupt me")
        stopped = server.run("interrupt", "-s", "slow")
        screen.kill()
    assert stopped.returncode == 0
    assert re.match(r"still stopping after \d s: task ", stopped.stderr), stopped.stderr
    assert stopped.stdout.startswith("gone after ")


class Stopping:
    """A session whose tree is read while it is being stopped."""

    def __init__(self) -> None:
        self.answers: list[TreeNode | None] = []

    async def tree(self) -> TreeNode:
        answer = self.answers.pop(0)
        if answer is None:
            raise ServerUnreachable
        return answer


def test_progress_is_reported_after_one_second_and_then_every_five() -> None:
    tree = TreeNode(kind="session", name="s", children=(TreeNode(kind="thread", name="read"),))

    async def main() -> tuple[str, list[str]]:
        session: Any = Stopping()
        session.answers = [tree, None, tree]
        lines: list[str] = []
        answer = await announce(session, asyncio.sleep(12.0, "receipt"), lines.append)
        return answer, lines

    lines = ["still stopping after 1 s: thread read", "still stopping after 11 s: thread read"]
    assert run_virtual(main()) == ("receipt", lines)


def test_an_error_of_the_stop_is_raised_as_it_is() -> None:
    async def refused() -> None:
        raise ServerUnreachable

    async def main() -> None:
        session: Any = Stopping()
        with pytest.raises(ServerUnreachable):
            await announce(session, refused(), print)

    run_virtual(main())


def member(kind: Any, name: str, **more: Any) -> TreeNode:
    return TreeNode(kind=kind, name=name, **more)


@pytest.mark.parametrize(
    ("members", "line"),
    [
        ([], "still stopping after 6 s"),
        ([member("task", "a")], "still stopping after 6 s: task a"),
        ([member("task", "a", state="abandoned")], "still stopping after 6 s"),
        (
            [member("task", "waits"), member("process", "sleep 9\x1b", processes=8)],
            "still stopping after 6 s: program sleep 9· (8 processes); a program is killed when its grace period ends",
        ),
        (
            [member("thread", name) for name in "abcde"],
            "still stopping after 6 s: thread a, thread b, thread c, 2 more",
        ),
    ],
)
def test_progress_names_what_is_left(members: list[TreeNode], line: str) -> None:
    scope = TreeNode(kind="scope", name="run", children=tuple(members))
    assert progress_line(TreeNode(kind="session", name="s", children=(scope,)), 6.2) == line


def test_an_admin_without_sessions_learns_that_others_have_some(server: Served, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("keys")
    admin = run("keys", "create", "ops", "--role", "admin", "--json", folder=folder)
    secret = json.loads(admin.stdout)["secret"]
    with served(folder) as guarded:
        none = guarded.run("ps", HOLDFAST_KEY=secret)
        assert (none.returncode, none.stdout) == (0, "")
        assert none.stderr == "no sessions; start one: holdfast chat -s NAME\n"
        alice = guarded.run("keys", "create", "alice", HOLDFAST_KEY=secret).stdout.strip()
        guarded.run("send", "count a", HOLDFAST_KEY=alice)
        some = guarded.run("ps", HOLDFAST_KEY=secret)
        assert some.stderr == "no sessions of your own; others have 1: holdfast ps --all\n"
        bob = guarded.run("keys", "create", "bob", HOLDFAST_KEY=secret).stdout.strip()
        assert guarded.run("ps", HOLDFAST_KEY=bob).stderr == "no sessions; start one: holdfast chat -s NAME\n"
        guarded.end()

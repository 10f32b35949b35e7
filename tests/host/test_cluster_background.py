"""Background work and trees of sessions that several hosts have parts of: any host stops them and shows them."""

import asyncio
import os
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.errors import StorageError
from holdfast.host import node_requests
from holdfast.host.node_requests import NodeRequests
from holdfast.protocol.messages import TreeNode
from holdfast.protocol.stopping import Cause
from holdfast.runtime import current_scope
from holdfast.server.principal_work import stop_principal
from holdfast.storage.port import Cluster, InterruptRequest
from holdfast.storage.postgres import PostgresStore
from tests.host.test_cluster import hosts, run, url
from tests.storage.postgres.test_races import end_lease

__all__ = ["url"]

pids: list[int] = []
begun: list[str] = []


@pytest.fixture(autouse=True)
def no_work_yet() -> None:
    pids.clear()
    begun.clear()


@holdfast.agent
async def starter(run: holdfast.Run) -> str:
    """Start background work, and wait if the text ends with `and wait`."""

    async def serve() -> None:
        begun.append(run.text)
        scope = current_scope()
        assert scope is not None
        program = await scope.process(["sleep", "1000"])
        assert program.pid is not None
        pids.append(program.pid)
        await asyncio.sleep(1000)

    async def brief() -> None:
        begun.append(run.text)

    run.background(brief if run.text == "brief" else serve, name="server")
    if run.text.endswith("and wait"):
        await run.interrupt.wait()
    return "started"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def with_program(host: holdfast.Host, text: str = "go", key: str = "alice") -> int:
    """Start background work with a program on this host; return the program's id."""
    await host.session(key).send(text)
    while not pids:
        await asyncio.sleep(0.005)
    return pids.pop()


def rows(url: str, table: str) -> list[Any]:
    with psycopg.connect(url.replace("&signals=off", "")) as connection:
        return connection.execute(f"SELECT * FROM {table}").fetchall()


def names(node: TreeNode) -> set[str]:
    return {node.name, *(name for child in node.children for name in names(child))}


@pytest.mark.parametrize("verb", ["stop", "delete"])
def test_a_stop_at_any_host_ends_background_work_of_others_and_returns_its_receipt(url: str, verb: str) -> None:
    async def main() -> None:
        async with hosts(url, 3, agents=(starter,)) as (holder, other, third):
            pid = await with_program(holder)
            await holder.session("alice").ask("brief")
            session = other.session("alice")
            stopped = await (session.stop("enough") if verb == "stop" else session.delete())
            assert not is_alive(pid)
            receipt = stopped.receipt
            assert (receipt.outcome, receipt.proof) == ("gone", "observed")
            assert receipt.stopped.programs == 1, "which only the holder can know"
            if verb == "stop":
                again = await third.session("alice").stop()
                assert (again.receipt.outcome, again.receipt.stopped.programs) == ("gone", 0)
        assert rows(url, "background") == rows(url, "node_request") == []

    run(main)


def test_a_stop_ends_the_run_here_and_the_background_work_there(url: str) -> None:
    async def main() -> None:
        async with hosts(url, 3, agents=(starter,)) as (one, two, third):
            there = await with_program(one)
            here = await with_program(two, "go and wait")
            receipt = (await third.session("alice").stop("enough")).receipt
            assert not is_alive(there)
            assert not is_alive(here)
            assert (receipt.outcome, receipt.stopped.programs) == ("gone", 2)

    run(main)


def test_the_tree_at_any_host_shows_what_others_have_of_the_session(url: str) -> None:
    async def main() -> None:
        async with hosts(url, 3, agents=(starter,)) as (one, two, third):
            await with_program(one)
            await with_program(two, "go and wait")
            tree = await third.session("alice").tree()
            assert (tree.kind, tree.name, tree.state) == ("session", "alice", "running")
            assert {child.name for child in tree.children if child.kind == "host"} == {one.node_id, two.node_id}
            assert [part.name for child in tree.children for part in child.children] == ["alice", "alice"]
            assert "server" in names(tree)
            own = await two.session("alice").tree()
            assert [child.name for child in own.children if child.kind == "host"] == [one.node_id]
            assert any(child.kind == "scope" for child in own.children), "its own part is where it was before"
            await third.session("bob").send("brief")
            assert not [child for child in (await third.session("bob").tree()).children if child.kind == "host"]
            await third.session("alice").stop()

    run(main)


class FailingNotes:
    """`Cluster.note_background` that fails at the first `failures` calls."""

    def __init__(self, cluster: Cluster, failures: int) -> None:
        self._note = cluster.note_background
        self._failures = failures
        self.calls = 0

    def __call__(self, session: int, run_id: str) -> asyncio.Future[int]:
        self.calls += 1
        if self.calls > self._failures:
            return self._note(session, run_id)
        failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        failed.set_exception(StorageError("busy"))
        return failed


def test_background_work_begins_once_other_hosts_can_find_it(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 1, agents=(starter,)) as (host,):
            cluster = host.store.cluster
            assert cluster is not None
            held: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            monkeypatch.setattr(cluster, "note_background", lambda session, run_id: held)
            await host.session("alice").ask("brief")
            assert begun == []
            held.set_result(cluster.epoch)
            while not begun:
                await asyncio.sleep(0.001)

    run(main)


def test_a_host_that_ends_before_it_answers_makes_the_receipt_one_of_the_lease(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 2, agents=(starter,)) as (holder, other):
            await with_program(holder)
            monkeypatch.setattr(NodeRequests, "look", lambda _: None)
            stopping = asyncio.ensure_future(other.session("alice").stop("enough"))
            while not rows(postgres_url, "node_request"):
                await asyncio.sleep(0.01)
            ((epoch, *_),) = rows(postgres_url, "background")
            end_lease(postgres_url, epoch)
            receipt = (await stopping).receipt
            assert (receipt.outcome, receipt.proof) == ("unknown", "lease")
            assert receipt.unattributed == ("background work on another host (which is gone)",)

    run(main)


def test_a_host_that_does_not_answer_in_time_is_named_in_the_receipt_and_the_tree(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_requests, "_MARGIN_S", -42.8)
    monkeypatch.setattr(node_requests, "_TREE_S", 0.1)

    async def main() -> None:
        async with hosts(postgres_url, 2, agents=(starter,)) as (holder, other):
            await with_program(holder)
            monkeypatch.setattr(NodeRequests, "look", lambda _: None)
            (part,) = (await other.session("alice").tree()).children
            assert (part.kind, part.name, part.state) == ("host", "another host", "no answer")
            receipt = (await other.session("alice").stop("enough")).receipt
            assert (receipt.outcome, receipt.proof) == ("unknown", "observed")
            assert "did not answer within" in receipt.unattributed[0]

    run(main)


def test_a_session_without_parts_elsewhere_costs_no_request(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 2, agents=(starter,)) as (one, other):
            await one.session("alice").ask("brief")
            while rows(postgres_url, "background"):
                await asyncio.sleep(0.01)
            assert (await other.session("alice").stop()).receipt.outcome == "gone"
            written = other.store.backend.counters.commits
            assert (await other.session("alice").tree()).children == ()
            assert other.store.backend.counters.commits == written, "a look writes nothing"
            with psycopg.connect(postgres_url) as connection:
                used = connection.execute("SELECT is_called FROM node_request_request_id_seq").fetchone()
            assert used == (False,)

    run(main)


def test_background_work_ends_although_the_host_that_was_told_to_stop_it_is_gone(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(f"{postgres_url}&signals=off", 1, agents=(starter,)) as (holder,):
            pid = await with_program(holder)
            gone = PostgresStore(postgres_url)
            await gone.open(node_id="gone", at=1.0)
            cause = Cause(kind="stop", reason="enough", at=2.0)
            stopped = await gone.stop_session(
                InterruptRequest(principal="local", key="alice", cause=cause, at=2.0, grace_s=1.0)
            )
            assert len(stopped.requests) == 1
            await gone.close()
            while is_alive(pid):
                await asyncio.sleep(0.005)

    run(main)


def test_background_work_of_an_epoch_that_was_ended_is_stopped_by_its_host(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 2, agents=(starter,)) as (holder, other):
            pid = await with_program(holder)
            ((epoch, _),) = rows(postgres_url, "background")
            end_lease(postgres_url, epoch)
            await other.store.rescue(at=5.0)
            await holder.session("bob").send("brief")  # its transaction begins another epoch
            watch = holder.parts.cluster_watch
            assert watch is not None
            await watch._poll()
            while is_alive(pid):
                await asyncio.sleep(0.005)
            receipt = (await other.session("alice").stop()).receipt
            assert (receipt.outcome, receipt.proof) == ("unknown", "lease"), "nobody saw its end under the old epoch"
            assert (await other.session("alice").stop()).receipt.outcome == "gone", "which is told once"

    run(main)


def test_background_work_of_a_host_that_is_gone_has_the_proof_of_the_lease(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 2, agents=(starter,)) as (holder, other):
            await with_program(holder)
            ((epoch, _),) = rows(postgres_url, "background")
            end_lease(postgres_url, epoch)
            receipt = (await other.session("alice").stop()).receipt
            assert (receipt.outcome, receipt.proof) == ("unknown", "lease")

    run(main)


def test_work_that_begins_after_a_stop_that_its_host_does_not_know_yet_is_stopped(postgres_url: str) -> None:
    release = asyncio.Event()
    steps: list[str] = []

    @holdfast.agent
    async def late(run: holdfast.Run) -> None:
        async def serve() -> None:
            steps.append("begun")
            await asyncio.sleep(1000)

        steps.append("started")
        await release.wait()
        run.background(serve, name="server")
        steps.append("asked")
        await run.interrupt.wait()

    async def main() -> None:
        async with hosts(f"{postgres_url}&signals=off", 2, agents=(late,), cluster_poll_s=1.0) as (holder, other):
            await holder.session("alice").send("go")
            while not steps:
                await asyncio.sleep(0.005)
            stopping = asyncio.ensure_future(other.session("alice").stop("enough"))
            while (await holder.session("alice").info()).state != "stopping":
                await asyncio.sleep(0.005)
            release.set()
            assert (await stopping).receipt.outcome == "gone"
            assert steps == ["started", "asked"], "it did not even begin"
            assert not any(live.background for live in holder.directory.live.values())

    run(main)


def test_a_stop_that_was_answered_too_late_is_carried_out_nevertheless(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_requests, "_MARGIN_S", -42.8)

    async def main() -> None:
        async with hosts(f"{postgres_url}&signals=off", 2, agents=(starter,)) as (holder, other):
            pid = await with_program(holder)
            with monkeypatch.context() as blind:
                blind.setattr(NodeRequests, "look", lambda _: None)
                assert (await other.session("alice").stop("enough")).receipt.outcome == "unknown"
            while is_alive(pid):
                await asyncio.sleep(0.005)

    run(main)


def test_a_request_is_carried_out_once_however_often_it_is_read(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 2, agents=(starter,)) as (holder, other):
            await with_program(holder)
            cluster, requests = holder.store.cluster, holder.parts.of_sessions.node_requests
            assert cluster is not None
            assert requests is not None
            seen: list[Any] = []
            read = cluster.requests

            async def read_again() -> Any:
                """What was open, also after it was answered: as a read that was slow."""
                seen.extend(await read())
                return tuple(seen)

            monkeypatch.setattr(cluster, "requests", read_again)
            assert (await other.session("alice").stop("enough")).receipt.outcome == "gone"
            assert len(seen) > 0
            again = await with_program(holder, "once more")
            await requests._look(0)
            await requests._look(0)
            for handling in list(requests._handling.values()):
                await handling
            assert is_alive(again), "the stop was before it began"
            monkeypatch.undo()
            await other.session("alice").stop()

    run(main)


def test_one_error_of_the_store_does_not_keep_background_work_from_beginning(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 1, agents=(starter,)) as (host,):
            cluster = host.store.cluster
            assert cluster is not None
            monkeypatch.setattr(cluster, "note_background", FailingNotes(cluster, 1))
            await host.session("alice").send("go and wait")
            while not begun:
                await asyncio.sleep(0.005)
            await host.session("alice").stop()
            while rows(postgres_url, "background"):
                await asyncio.sleep(0.01)

    run(main)


def test_the_tree_of_a_database_that_accepts_no_writes_shows_this_host_and_that_others_are_missing(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 2, agents=(starter,)) as (holder, other):
            await with_program(holder)
            cluster = other.store.cluster
            assert cluster is not None

            async def refuse(session: int, kind: Any, body: bytes) -> Any:
                raise StorageError("read-only")

            monkeypatch.setattr(cluster, "ask", refuse)
            (part,) = (await other.session("alice").tree()).children
            assert (part.kind, part.name, part.state) == ("host", "other hosts", "no answer")
            await holder.session("alice").stop()

    run(main)


def test_the_sessions_of_a_principal_include_background_work_of_other_hosts(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 2, agents=(starter,)) as (holder, other):
            pid = await with_program(holder)
            while (await holder.session("alice").info()).run_id:
                await asyncio.sleep(0.005)
            assert (await stop_principal(other, "nobody")).sessions == ()
            assert (await stop_principal(other, "local")).sessions == ("alice",)
            assert not is_alive(pid)

    run(main)


def test_an_old_stop_that_is_read_late_ends_no_newer_work(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(f"{postgres_url}&signals=off", 2, agents=(starter,), cluster_poll_s=30.0) as (one, two):
            await with_program(one)
            stopping = asyncio.ensure_future(two.session("alice").stop("enough"))
            while not rows(postgres_url, "node_request"):
                await asyncio.sleep(0.005)
            newer = await with_program(one, "once more")
            watch = one.parts.cluster_watch
            assert watch is not None
            await watch._poll()
            assert (await stopping).receipt.stopped.programs == 1
            assert is_alive(newer)
            await one.session("alice").stop()

    run(main)


def test_work_of_the_new_epoch_goes_on(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 2, agents=(starter,)) as (holder, other):
            old = await with_program(holder)
            ((epoch, _),) = rows(postgres_url, "background")
            end_lease(postgres_url, epoch)
            await other.store.rescue(at=5.0)
            new = await with_program(holder, "once more", key="bob")
            watch = holder.parts.cluster_watch
            assert watch is not None
            await watch._poll()
            while is_alive(old):
                await asyncio.sleep(0.005)
            assert is_alive(new)
            await holder.session("bob").stop()

    run(main)


def test_work_whose_run_has_ended_before_it_could_be_recorded_does_not_begin(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 1, agents=(starter,)) as (host,):
            cluster = host.store.cluster
            assert cluster is not None
            notes = FailingNotes(cluster, 2)
            monkeypatch.setattr(cluster, "note_background", notes)
            await host.session("alice").ask("brief")
            while any(live.background for live in host.directory.live.values()):
                await asyncio.sleep(0.005)
            assert (begun, notes.calls) == ([], 3), "a stop in the meantime would have missed it"
            assert rows(postgres_url, "background") == []

    run(main)


def test_a_request_that_fails_is_repeated(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out = NodeRequests._carry_out
    tries: list[int] = []

    async def fail_once(self: NodeRequests, request: Any) -> bytes:
        tries.append(request.request_id)
        if len(tries) == 1:
            raise RuntimeError("once")
        return await carry_out(self, request)

    monkeypatch.setattr(NodeRequests, "_carry_out", fail_once)

    async def main() -> None:
        async with hosts(f"{postgres_url}&signals=off", 2, agents=(starter,)) as (holder, other):
            pid = await with_program(holder)
            assert (await other.session("alice").stop()).receipt.outcome == "gone"
            assert not is_alive(pid)
            assert len(tries) == 2

    run(main)

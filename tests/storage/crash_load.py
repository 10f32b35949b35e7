"""A load that passes every failpoint of the SQLite store, killed at each of them in a process of its own.

Run as ``python crash_load.py <folder>``: for each failpoint a child is forked that runs the load on
``<folder>/<failpoint>.db`` and notes what was answered in ``<failpoint>.answers``. Prints how each child ended.
"""

import asyncio
import json
import os
import sys
from unittest.mock import patch

import msgspec

from holdfast import failpoints
from holdfast.protocol.call_hash import hash_call
from holdfast.protocol.messages import Access, Answer, Attachment, Entry, GrantScope, Question
from holdfast.protocol.schedules import ScheduleSpec
from holdfast.protocol.stopping import Cause
from holdfast.storage import SqliteStore
from holdfast.storage.port import Claim, EditHistory, Fire, InterruptRequest, KeyRecord, PutSchedule, RunCommit, Send
from holdfast.storage.sqlite import checkpoints

USER = Cause(kind="user", reason="enough")


class Load:
    def __init__(self, path, answers):
        self.path = path
        self.answers = answers
        self.at = 0.0

    def note(self, key, events):
        line = json.dumps({"key": key, "events": [[e.seq, e.kind, e.body.decode()] for e in events]})
        os.write(self.answers, line.encode() + b"\n")

    def later(self):
        self.at += 1.0
        return self.at

    async def open(self):
        self.store = SqliteStore(self.path)
        await self.store.open(node_id="n", at=self.later())

    async def send(self, key, message_id, *, policy="queue", room=True, **more):
        result = await self.store.send(
            Send(
                principal="p",
                key=key,
                agent=None,
                default_agent="demo",
                message_id=message_id,
                content=message_id,
                policy=policy,
                at=self.later(),
                run_id=f"r_{message_id}" if room else None,
                idempotency_key=message_id,
                **more,
            )
        )
        self.note(key, result.events)
        return result

    async def commit(self, key, claim, **more):
        done = await self.store.commit_run(
            RunCommit(
                lease=claim.lease,
                status="completed",
                at=self.later(),
                entries=[Entry(role="user", content="x"), Entry(role="assistant", content="y")],
                **more,
            )
        )
        self.note(key, done.events)
        return done

    async def append(self, key, claim, nth):
        done = await self.store.append(
            claim.lease, [("text.delta", b'{"kind":"text.delta","run_id":"r","text":"t"}')] * 3, nth=nth
        )
        self.note(key, done.events)

    async def run(self):
        store = self.store
        await asyncio.gather(*(self.send(f"k{n}", f"a{n}") for n in range(5)))
        first = (await self.send("busy", "b1")).claim
        for n in range(2, 6):
            await self.send("busy", f"b{n}")
        await asyncio.gather(self.append("busy", first, 1), self.append("busy", first, 2))
        _, events = await store.withdraw("p", "busy", "b3", at=self.later())
        self.note("busy", events)
        hit = await store.interrupt(InterruptRequest(principal="p", key="busy", cause=USER, at=self.later()))
        self.note("busy", hit.events)
        done = await self.commit("busy", first, next_run_id="r_next")
        for nth in range(1, 9):
            await self.append("busy", done.claim, nth)
        await self.commit("busy", done.claim)
        ready = await store.ready(limit=10)
        claim = await store.claim(ready[0].session, run_id="r_claimed", at=self.later())
        assert isinstance(claim, Claim)
        self.note("busy", claim.events)
        await self.send("busy", "b9", policy="interrupt")
        stopped = await store.stop_session(InterruptRequest(principal="p", key="busy", cause=USER, at=self.later()))
        self.note("busy", stopped.events)
        await self.commit("busy", claim)
        await self.send("gone", "g1", room=False)
        gone = await store.delete_session("p", "gone", at=self.later(), cause=USER)
        self.note("gone", gone.events)
        await store.add_key(KeyRecord(key_id="key", principal="p", role="user", digest=b"d", created_at=1.0))
        await store.revoke_key("key", at=2.0)
        await self.people()
        await self.grants()
        await self.schedules()
        await self.send("kept", "c1")
        await store.close()
        await self.open()
        store = self.store
        claims = await store.rescue(at=self.later())
        for claim in claims:
            if claim.key == "kept":
                again = await store.restart(claim.lease, at=self.later())
                self.note("kept", again.events)
                await self.append("kept", claim, 1)
        await store.prune(
            events_before=0.0,
            tombstones_before=0.0,
            idempotency_before=self.later(),
            attachments_before=self.later(),
        )
        await store.close()

    async def checkpoints(self):
        """Their thread passes a failpoint sooner or later; each write asks for another checkpoint."""
        await self.open()
        for n in range(1000):
            await self.send("busy", f"x{n}", room=False, mailbox_limit=2000)
        await self.store.close()

    async def people(self):
        store = self.store
        for digest in ("used", "unused"):
            attachment = await store.add_attachment(
                "p", Attachment(digest=digest, media_type="text/plain"), b"body", at=self.later(), limit_bytes=100
            )
            os.write(self.answers, json.dumps({"attachment": digest}).encode() + b"\n")
        claim = (await self.send("asks", "d1", attachments=(msgspec.structs.replace(attachment, digest="used"),))).claim
        await self.send("asks", "d2", policy="steer")
        self.note("asks", (await store.steer(claim.lease, step=2, at=self.later())).events)
        question = Question(question_id="q", kind="question", asked_at=self.later(), due_at=99.0)
        self.note("asks", (await store.suspend(claim.lease, question)).events)
        await store.park(claim.lease, at=self.later())
        answer = Answer(question_id="q", decision="answered", text="yes", at=self.later())
        self.note("asks", (await store.answer("p", "asks", answer)).events)
        claim = await store.claim(claim.lease.session, run_id="r_resumed", at=self.later())
        assert isinstance(claim, Claim)
        await self.commit("asks", claim)
        for edit in ("compact", "undo"):
            edited = await store.edit_history(
                EditHistory(
                    principal="p", key="asks", edit=edit, at=self.later(), entries=[Entry(role="summary", content="s")]
                )
            )
            self.note("asks", edited.events)
        claim = (await self.send("asks", "d3", retry_of=claim.lease.run_id)).claim
        await self.send("asks", "d4", policy="rollback")
        await self.commit("asks", claim, not_undone=("pay",))

    async def grants(self):
        """One grant stays, one is revoked, and one ends with its session."""
        scopes: dict[str, GrantScope] = {"stays": "session", "revoked": "principal", "ends": "session"}
        for key, scope in scopes.items():
            claim = (await self.send(f"grant {key}", f"g_{key}")).claim
            question = Question(
                question_id=f"q_{key}",
                kind="approval",
                tool="terminal",
                asked_at=self.later(),
                access=Access(write=("/w/report.md",)),
            )
            self.note(f"grant {key}", (await self.store.suspend(claim.lease, question)).events)
            answer = Answer(
                question_id=question.question_id,
                decision="approved",
                at=self.later(),
                call_hash=hash_call(question),
                scope=scope,
                grant_id=key,
            )
            self.note(f"grant {key}", (await self.store.answer("p", f"grant {key}", answer)).events)
            self.note_grant(key, "granted")
            await self.commit(f"grant {key}", claim)
        self.note_grant("revoked", "ending")
        await self.store.revoke_grant("p", "revoked")
        self.note_grant("revoked", "ended")
        self.note_grant("ends", "ending")
        gone = await self.store.delete_session("p", "grant ends", at=self.later(), cause=USER)
        self.note("grant ends", gone.events)
        self.note_grant("ends", "ended")

    def note_grant(self, grant_id, state):
        os.write(self.answers, json.dumps({"grant": grant_id, "state": state}).encode() + b"\n")

    async def schedules(self):
        """Ten ticks of one schedule are fired, one is refused; another one is paused and deleted."""
        store = self.store
        first_at = 100.0
        for schedule_id, session in (("ticks", "timed"), ("gone", "timed"), ("never", "nobody")):
            spec = ScheduleSpec(session=session, text="tick", every_s=10.0, initial_delay_s=0.0, overlap="reject")
            await store.put_schedule(PutSchedule(principal="p", schedule_id=schedule_id, spec=spec, at=first_at))
            self.note_schedule(schedule_id, 0)
        await store.pause_schedule("p", "gone", paused=True, at=self.later())
        await store.delete_schedule("p", "gone")
        self.note_schedule("gone", None)
        await store.pause_schedule("p", "never", paused=True, at=self.later())
        fired = 0
        for tick in range(10):
            (due,) = await store.due_schedules(now=first_at + tick * 10.0, limit=9)
            send = Send(
                principal="p",
                key="timed",
                agent=None,
                default_agent="demo",
                message_id=f"tick{tick}",
                content="tick",
                policy="reject",
                at=first_at + tick * 10.0,
                run_id=f"r_tick{tick}",
                served={"demo": ""},
            )
            done = await store.fire_schedule(Fire(schedule=due.schedule, revision=due.revision, send=send))
            if tick == 5:
                assert done.outcome == "busy"
            else:
                fired += 1
                assert done.sent is not None
                claim = done.sent.claim
                self.note("timed", done.sent.events)
                self.note_schedule("ticks", fired)
            if tick != 4:
                await self.commit("timed", claim)

    def note_schedule(self, schedule_id, fired):
        os.write(self.answers, json.dumps({"schedule": schedule_id, "fired": fired}).encode() + b"\n")


async def child(folder, name):
    answers = os.open(os.path.join(folder, f"{name}.answers"), os.O_WRONLY | os.O_CREAT)
    load = Load(os.path.join(folder, f"{name}.db"), answers)
    if not name.startswith("sqlite.checkpoint."):
        with failpoints.arm(name, error=None):
            await load.open()
            await load.run()
            await load.store.close()  # merges events
        return
    with (
        patch.multiple(
            checkpoints, _FIRST_AFTER=1, _AT_MOST_AFTER=1, _REUSE_AT=0
        ),  # after each write, of the whole log
        failpoints.arm(name, error=None, nth=20),
    ):
        await load.open()
        await load.run()
        await load.checkpoints()


def main(folder):
    for name in failpoints.names():
        if not name.startswith("sqlite."):
            continue
        pid = os.fork()
        if pid == 0:
            asyncio.run(child(folder, name))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(name, status, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

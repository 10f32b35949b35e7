"""The page of a session shows what it holds, acts only for its owner, and only for its own forms."""

from __future__ import annotations

import html
import re
from typing import Any
from urllib.parse import quote

import pytest

from holdfast import Run
from holdfast.host.budgets import Budget
from holdfast.server.page_form import TEXT_CHARACTERS
from tests.server.live import Live, counting, echo, endless, served

MARKUP = '<script>alert("1")</script>&\'"<b>'
TO_STOP = {"action": "stop", "session": "s"}


async def key_of(server: Live, principal: str, role: str = "user") -> dict[str, str]:
    """Headers of a browser that shows the server's page to somebody with a key."""
    _, secret = await server.app.keys.create(principal=principal, role=role)  # type: ignore[arg-type]
    return {"authorization": f"Bearer {secret}", "origin": server.url}


def test_a_session_is_reached_from_the_status_page_and_shows_its_transcript() -> None:
    async def scenario(server: Live) -> None:
        await server.post("my%20session%20%3F%23%25", "hello", query="?wait=60")
        (link,) = set(re.findall(r'href="(/sessions/[^"]*)"', (await server.http.get("/")).text))
        answer = await server.http.get(html.unescape(link))
        assert answer.status_code == 200
        assert "<h1>my session ?#%</h1>" in answer.text
        assert '<p class="text">hello</p>' in answer.text and '<p class="text">echo hello</p>' in answer.text
        assert 'http-equiv="refresh"' not in answer.text, "nothing runs"

    served(scenario)


def test_links_of_the_status_page_lead_somewhere() -> None:
    async def scenario(server: Live) -> None:
        await server.post("s", query="?wait=60")
        links = set(re.findall(r'href="([^"]*)"', (await server.http.get("/")).text))
        assert links >= {"/openapi.json", "/metrics", "/healthz", "/readyz", "/sessions/s"}
        for link in links:
            assert (await server.http.get(link)).status_code == 200, link

    served(scenario)


def test_nothing_on_the_page_of_a_session_becomes_markup() -> None:
    async def called(run: Run) -> str:
        async def note(text: str) -> str:
            return text

        note.__name__ = "note"
        return str(await run.call(note, f"{run.text} \u202e", name=MARKUP))

    async def scenario(server: Live) -> None:
        key = MARKUP.replace("/", "")
        path = quote(key, safe="")
        await server.post(path, MARKUP, query="?wait=60")
        answer = await server.http.get(f"/sessions/{path}?stop={path}&write={path}")
        assert "&lt;script&gt;alert(&quot;1&quot;)" in answer.text and "<h2>Transcript" in answer.text
        assert "<script" not in answer.text and "&quot;<b>" not in answer.text and "\u202e" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert policy == (await server.http.get("/")).headers["content-security-policy"]
        assert "script" not in policy and "frame-ancestors 'none'" in policy
        failed = {"action": "send", "session": key, "text": " "}
        shown = await server.http.post("/", data=failed, headers={"origin": server.url})
        assert "the message is empty" in shown.text and "<script" not in shown.text

    served(scenario, echo)
    served(scenario, called)


def test_a_message_is_sent_by_form_and_the_page_loads_again_without_sending_twice() -> None:
    async def scenario(server: Live) -> None:
        form = {"action": "send", "session": "s", "text": "first line\r\nblue & green ✓"}
        await server.post("s", query="?wait=60")
        answer = await server.http.post("/", data=form, headers={"origin": server.url})
        assert (answer.status_code, answer.headers["location"]) == (303, "/sessions/s")
        assert answer.headers["cache-control"] == "no-store"
        while "echo first" not in (text := (await server.http.get("/sessions/s")).text):
            pass
        assert "first line\nblue &amp; green ✓" in text
        assert text.count('<span class="soft">user</span>') == 2

    served(scenario)


def form_of(page: str) -> dict[str, str]:
    """The hidden fields of the form for a message."""
    (form,) = re.findall(r"<form(?:(?!</form>).)*<textarea", page, re.DOTALL)
    return dict(re.findall(r'type="hidden" name="([^"]*)" value="([^"]*)"', form))


def test_a_form_that_is_submitted_twice_sends_one_message_and_a_new_page_another() -> None:
    async def scenario(server: Live) -> None:
        await server.post("s", query="?wait=60")
        origin = {"origin": server.url}
        form = form_of((await server.http.get("/sessions/s")).text) | {"text": "same"}
        for _ in range(2):
            answer = await server.http.post("/", data=form, headers=origin)
            assert (answer.status_code, answer.headers["location"]) == (303, "/sessions/s")
        session = server.host.session("s")
        await session.ask("end")
        assert [entry.content for entry in await session.transcript() if entry.role == "user"] == ["hi", "same", "end"]
        again = form_of((await server.http.get("/sessions/s")).text) | {"text": "same"}
        assert again["idempotency_key"] != form["idempotency_key"]
        await server.http.post("/", data=again, headers=origin)
        await session.ask("end")
        assert [entry.content for entry in await session.transcript()].count("same") == 2
        edited = await server.http.post("/", data=again | {"text": "other"}, headers=origin)
        assert edited.status_code == 200 and "idempotency key" in edited.text, "of a page that was gone back to"
        retried = form_of(edited.text) | {"text": "other"}
        assert (await server.http.post("/", data=retried, headers=origin)).status_code == 303

    served(scenario)


def test_the_text_of_a_refused_message_is_still_in_the_form() -> None:
    async def scenario(server: Live) -> None:
        await server.post("s", query="?wait=60")
        for text in ("\n" + MARKUP + "\n" * TEXT_CHARACTERS, "\nfirst\n\nlast" + "x" * TEXT_CHARACTERS):
            form = {"action": "send", "session": "s", "text": text.replace("\n", "\r\n")}
            page = (await server.http.post("/", data=form, headers={"origin": server.url})).text
            assert 'role="alert"' in page and "<script" not in page
            (shown,) = re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", page, re.DOTALL)  # HTML drops the first newline
            assert html.unescape(shown) == text
        assert "<textarea" in page and len(await server.host.session("s").runs()) == 1

    served(scenario)


def test_a_view_of_an_admin_is_charged_to_the_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Live) -> None:
        await server.host.session("s", principal="alice").ask("hello")
        charged: list[str] = []
        wait_for = Budget.wait_for

        def recorded(budget: Budget, principal: str, *args: Any, **options: Any) -> Any:
            charged.append(principal)
            return wait_for(budget, principal, *args, **options)

        monkeypatch.setattr(Budget, "wait_for", recorded)
        assert "echo hello" in (await server.http.get("/sessions/s?user=alice")).text
        assert charged and "alice" not in charged

    served(scenario)


def test_a_run_is_interrupted_and_a_session_stopped_by_form_and_the_receipt_is_shown() -> None:
    async def scenario(server: Live) -> None:
        receipt = await server.begun("s")
        text = (await server.http.get("/sessions/s")).text
        assert 'http-equiv="refresh"' in text and "<textarea" not in text, "it would take away what is being typed"
        assert f'name="run_id" value="{receipt["run_id"]}"' in text and 'value="interrupt"' in text
        writing = (await server.http.get("/sessions/s?write=true")).text
        assert 'http-equiv="refresh"' not in writing and "<textarea" in writing
        origin = {"origin": server.url}
        older = {"action": "interrupt", "session": "s", "run_id": "r_of_before"}
        assert (await server.http.post("/", data=older, headers=origin)).status_code in (200, 303)
        assert (await server.host.session("s").info()).run_id == receipt["run_id"], "a stale page ends a newer run"
        form = {"action": "interrupt", "session": "s", "run_id": receipt["run_id"]}
        answer = await server.http.post("/", data=form, headers=origin)
        assert answer.status_code == 303 and answer.headers["location"].startswith("/sessions/s?stop=")
        shown = (await server.http.get(answer.headers["location"])).text
        assert "<h2>Interrupt</h2>" in shown and re.search(r"after \d+ ms: tasks \d", shown)
        assert 'value="interrupt"' not in shown
        await server.begun("s")
        await server.post("s", "waits")
        answer = await server.http.post("/", data=TO_STOP, headers=origin)
        shown = (await server.http.get(answer.headers["location"])).text
        assert "<h2>Stop</h2>" in shown and "withdrawn messages: 1" in shown
        assert (await server.host.session("s").info()).state == "idle"
        assert (await server.http.get("/sessions/s?stop=unknown")).status_code == 200

    served(scenario)


@pytest.mark.parametrize("headers", [{}, {"origin": "null"}, {"origin": "http://evil.example"}])
@pytest.mark.parametrize("action", ["stop", "interrupt", "send"])
def test_a_form_of_another_site_is_refused(action: str, headers: dict[str, str]) -> None:
    async def scenario(server: Live) -> None:
        receipt = await server.begun("s")
        form = {"action": action, "session": "s", "text": "x"}
        refused = await server.http.post("/", data=form, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_refused")
        assert (await server.http.get("/", params=form)).status_code == 200
        await server.http.get("/sessions/s", params=form)
        view = await server.host.session("s").info()
        assert (view.run_id, view.state, view.waiting) == (receipt["run_id"], "running", 0)

    served(scenario)


def test_sessions_of_others_are_neither_shown_nor_touched() -> None:
    async def scenario(server: Live) -> None:
        headers = await key_of(server, "mallory")
        await server.host.session("s", principal="alice").send("secret of alice", agent="endless")
        for path in ("/sessions/s", "/sessions/s?user=alice", "/sessions/never", "/sessions/never?user=alice"):
            answer = await server.http.get(path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_session"), path
            assert "alice" not in answer.text
        for action in ("stop", "interrupt"):
            form = {"action": action, "session": "s", "user": "alice"}
            told = (await server.http.post("/?user=alice", data=form, headers=headers)).text
            assert "no such session" in told and "secret" not in told
        sent = await server.http.post(
            "/?user=alice", data={"action": "send", "session": "s", "text": "x", "user": "alice"}, headers=headers
        )
        assert sent.status_code == 303, "it is a session of mallory now, with the same key"
        alices = await server.host.session("s", principal="alice").info()
        assert (alices.state, alices.waiting) == ("running", 0)
        await server.host.session("s", principal="alice").stop()

    served(scenario, echo, endless)


def test_an_admin_sees_sessions_of_others_and_cannot_act_on_them() -> None:
    async def scenario(server: Live) -> None:
        receipt = await server.host.session("s", principal="bo b").send("x", agent="endless")
        async for event in server.host.session("s", principal="bo b").events(after=receipt.cursor):
            if event.kind == "text.delta":
                break
        assert 'href="/sessions/s?user=bo+b"' in (await server.http.get("/")).text
        text = (await server.http.get("/sessions/s?user=bo+b")).text
        assert "of bo b (read only)" in text
        assert "<form" not in text and "<button" not in text and "<textarea" not in text
        await server.host.session("s", principal="bo b").stop()

    served(scenario, echo, endless)


def test_a_key_without_an_agent_cannot_send_to_it_by_form() -> None:
    async def scenario(server: Live) -> None:
        headers = await key_of(server, "alice")
        await server.host.session("s", principal="alice").ask("1", agent="counting")
        form = {"action": "send", "session": "s", "text": "2"}
        told = await server.http.post("/", data=form, headers=headers)
        assert told.status_code == 200 and 'role="alert"' in told.text and "<h1>s</h1>" in told.text
        assert len(await server.host.session("s", principal="alice").runs()) == 1

    served(scenario, echo, counting, public_agents=("echo",))


def test_bad_forms_are_refused_and_change_nothing() -> None:
    async def scenario(server: Live) -> None:
        origin = {"origin": server.url}
        await server.post("s", query="?wait=60")
        for action in ("delete", "", "STOP", MARKUP):
            body = f"action={quote(action)}&session=s"
            refused = await server.http.post("/", content=body, headers=origin)
            assert refused.status_code == 422 or not action, refused.text
        long = {"action": "send", "session": "s", "text": "x" * (TEXT_CHARACTERS + 1)}
        told = await server.http.post("/", data=long, headers=origin)
        assert told.status_code == 200 and "a page sends at most 8,192" in told.text
        huge = {**long, "text": "x" * 200_000}
        assert (await server.http.post("/", data=huge, headers=origin)).status_code == 413
        for session in ("", "a/b", "\x00", "x" * 300, "never"):
            told = await server.http.post("/", data={**TO_STOP, "session": session}, headers=origin)
            assert told.status_code == 200 and 'role="alert"' in told.text, session
        refused = await server.http.post("/sessions/s", data=TO_STOP, headers=origin)
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
        assert len(await server.host.session("s").runs()) == 1

    served(scenario)


def test_the_newest_entries_of_a_long_transcript_are_shown() -> None:
    async def large(run: Run) -> str:
        return run.text * 100_000 if run.text.startswith("large") else run.text

    async def scenario(server: Live) -> None:
        session = server.host.session("s")
        for number in range(40):
            await session.ask(f"word {number}.")
        text = (await server.http.get("/sessions/s")).text
        assert "word 39." in text and "word 15." in text and "word 14." not in text and "Newest 50 only" in text
        for number in range(4):
            await session.ask(f"large {number}")
        text = (await server.http.get("/sessions/s")).text
        assert "large 3" in text and "more characters" in text and "word 1." not in text
        assert len(text) < 60_000
        for limit in (1, 2, 7, 100):
            entries, charge = await session.newest_entries(limit, reader="local")
            charge.release()
            assert entries[-1].n == 88 and len(entries) <= limit

    served(scenario, large)

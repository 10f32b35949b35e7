"""The page and the metrics show what runs, and nothing of a user's text becomes markup."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Agent, Host, Run, tool
from holdfast.agents import Call
from holdfast.agents.scripted import ScriptedModel
from holdfast.host import PROMISES
from holdfast.protocol.events import RunSuspended, TextDelta
from holdfast.protocol.model import CallPart
from holdfast.server import metrics, page
from holdfast.server.activity import read_activity
from tests.server.live import Live, echo, served

MARKUP = '<script>alert("1")</script>&\'"'


def test_the_page_escapes_everything_and_allows_no_script() -> None:
    async def scenario(server: Live) -> None:
        key = quote(MARKUP.replace("/", ""), safe="")
        await server.post(key, MARKUP, query="?wait=60")
        answer = await server.http.get("/")
        assert "&lt;script&gt;alert(&quot;1&quot;)" in answer.text
        assert "<script" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script" not in policy
        assert "unsafe" not in policy
        assert "form-action 'self'" in policy
        assert answer.headers["referrer-policy"] == "same-origin", "under no-referrer browsers send forms as of nobody"
        assert answer.headers["x-content-type-options"] == "nosniff"

    served(scenario)


def test_the_page_shows_what_runs_and_the_lines_to_paste() -> None:
    async def scenario(server: Live) -> None:
        receipt = await server.begun("alice")
        await server.post("alice", "waits")
        text = (await server.http.get("/")).text
        assert "alice" in text
        assert receipt["run_id"] in text
        assert re.search(r"<b class=\"busy\">1</b><span>active runs", text)
        assert re.search(r"<b class=\"\">1</b><span>queued messages", text)
        assert f"curl -s &#x27;{server.url}/v1/sessions/first/messages?wait=30&#x27;" in text
        assert f"holdfast.Client(&quot;{server.url}&quot;)" in text
        for number in PROMISES:
            assert f">{number} " in text

    served(scenario)


def test_a_user_sees_only_its_own_on_the_page() -> None:
    async def scenario(server: Live) -> None:
        await server.post("of-local", query="?wait=60")
        _, secret = await server.app.keys.create(principal="alice", role="user")
        text = (await server.http.get("/", headers={"authorization": f"Bearer {secret}"})).text
        assert "of-local" not in text
        assert "Incidents" not in text
        assert "$HOLDFAST_KEY" in text
        assert secret not in text

    served(scenario)


def test_what_branches_say_beside_each_other_is_told_apart() -> None:
    said = [("a", "one "), ("a", "two"), ("b", "three"), ("a", "four")]
    now = read_activity(TextDelta(at=0.0, run_id=run_id, text=text) for run_id, text in said)
    assert now.said == "one two\nthree\nfour"


def test_a_page_that_fails_is_an_internal_error_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(*given: object, **named: object) -> str:
        raise ValueError("password=hunter2")

    async def scenario(server: Live) -> None:
        answer = await server.http.get("/")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert (await server.http.get("/healthz")).status_code == 200

    monkeypatch.setattr(page, "render", failing)
    served(scenario)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == "GET / failed: ValueError: password=***"
    assert "hunter2" not in caplog.text


def test_the_page_shows_schedules_to_those_whose_they_are() -> None:
    async def scenario(server: Live) -> None:
        assert "<h2>Schedules" not in (await server.http.get("/")).text
        session = server.host.session("news", principal="local")
        await session.schedule("x", cron="30 9 * * MON-FRI", timezone="Europe/Berlin", schedule_id="morning<b>")
        paused = await session.schedule("x", every_s=90, schedule_id="slow")
        await paused.pause()
        text = (await server.http.get("/")).text
        assert "morning&lt;b&gt;" in text
        assert "30 9 * * MON-FRI (Europe/Berlin)" in text
        assert "<td>every 90 s</td><td>paused</td>" in text
        _, secret = await server.app.keys.create(principal="alice", role="user")
        text = (await server.http.get("/", headers={"authorization": f"Bearer {secret}"})).text
        assert "<h2>Schedules" not in text

    served(scenario)


def test_the_metrics_can_be_read_by_prometheus() -> None:
    async def scenario(server: Live) -> None:
        await server.post("alice", query="?wait=60")
        await server.http.get("/v1/sessions/nobody")
        answer = await server.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        assert len(families["holdfast_promise_kept"].samples) == len(PROMISES)
        answers = {sample.labels["status"]: sample.value for sample in families["holdfast_http_answers"].samples}
        assert (answers["200"], answers["404"]) == (1, 1)
        counts = {sample.labels["name"]: sample.value for sample in families["holdfast_host_events"].samples}
        assert counts["runs_completed"] == 1

    served(scenario)


def test_a_label_is_escaped() -> None:
    host = Host(echo, store="memory://")
    host.incidents.counts['odd "name"\n\\'] = 1
    text = metrics.render(host.statistics(), streams=0, answers={})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert 'odd "name"\n\\' in [sample.labels["name"] for sample in families["holdfast_host_events"].samples]


def test_the_page_refuses_in_the_documented_shape_and_asks_a_browser_for_the_key() -> None:
    async def scenario(server: Live) -> None:
        await server.app.keys.create(principal="alice", role="user")
        answer = await server.http.get("/")
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["code"] == "unauthenticated"
        assert answer.headers["www-authenticate"].startswith("Basic ")

    served(scenario)


async def asker(run: Run) -> str:
    """Ask a person."""
    return (await run.ask_user(f"which colour? {MARKUP} \u202e")).text


@tool(approval=True)
async def erase(call: Call, name: str) -> str:
    """Erase a file, and say how it goes."""
    await call.output(f"erasing {name} {MARKUP}")
    await call.run.interrupt.wait()
    return "erased"


def eraser() -> Agent:
    """An agent that wants to erase."""
    return Agent(name="eraser", model=ScriptedModel([CallPart(name="erase", arguments={"name": "a"})]), tools=[erase])


async def asked(server: Live, key: str, agent: str) -> str:
    """Start a run that asks something; the question's id."""
    receipt = (await server.post(key, agent=agent)).json()
    async for event in server.host.session(key).events(after=receipt["cursor"]):
        if isinstance(event, RunSuspended):
            return event.question.question_id
    raise AssertionError("it asked nothing")


def test_a_call_is_approved_on_the_page_and_its_progress_is_shown() -> None:
    async def scenario(server: Live) -> None:
        assert 'http-equiv="refresh"' in (await server.http.get("/")).text
        question = await asked(server, "s", "eraser")
        text = (await server.http.get("/")).text
        assert "Allow <b>erase</b>" in text and "suspended" in text
        assert 'http-equiv="refresh"' not in text, "it would take the form away while somebody uses it"
        buttons = re.findall("<button[^>]*>", text)
        assert buttons[0] == "<button disabled hidden>", "Enter behind a reason to deny presses the first one"
        form = {"session": "s", "question": question, "decision": "approve", "text": ""}
        form["call_hash"] = (await server.host.session("s").questions())[0].call_hash
        assert f'name="call_hash" value="{form["call_hash"]}"' in text
        for headers in ({}, {"origin": "http://evil.example"}, {"origin": "null"}):
            refused = await server.http.post("/", data=form, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_refused")
        assert len(await server.host.session("s").questions()) == 1
        answer = await server.http.post("/", data=form, headers={"origin": server.url})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        while "erasing a" not in (text := (await server.http.get("/")).text):
            pass
        assert "erase <code>{&quot;name&quot;:&quot;a&quot;}</code>" in text
        assert "<script" not in text and "1 + 1 tokens" in text
        again = await server.http.post("/", data={**form, "decision": "deny"}, headers={"origin": server.url})
        assert "was approved" in again.text or "no open question" in again.text

    served(scenario, echo, eraser())


def test_a_question_is_answered_on_the_page_by_whom_it_is_for() -> None:
    async def scenario(server: Live) -> None:
        question = await asked(server, "s", "asker")
        text = (await server.http.get("/")).text
        assert "<script" not in text and "\u202e" not in text and "\\u202e" in text
        other = {"x-holdfast-user": "mallory", "origin": server.url}
        form = {"session": "s", "question": question, "decision": "answer", "text": "blue & green ✓"}
        assert "no such session" in (await server.http.post("/", data=form, headers=other)).text
        for broken in (b"", b"decision=answer", b"\xff", b"decision=perhaps&session=s&question=q"):
            refused = await server.http.post("/", content=broken, headers={"origin": server.url})
            assert refused.status_code in (200, 422), refused.text
        assert (await server.http.post("/", content=b"x" * 200_000, headers={"origin": server.url})).status_code == 413
        await server.http.post("/", data=form, headers={"origin": server.url})
        settled = (await server.host.session("s").runs())[0].messages[0]
        assert (await server.host.session("s").wait(settled)).text == "blue & green ✓"

    served(scenario, echo, asker)


def test_an_admin_sees_what_others_are_asked_and_cannot_answer_for_them() -> None:
    async def scenario(server: Live) -> None:
        receipt = await server.host.session("theirs", principal="bob").send("x", agent="asker")
        async for event in server.host.session("theirs", principal="bob").events(after=receipt.cursor):
            if event.kind == "run.suspended":
                break
        text = (await server.http.get("/")).text
        assert "which colour?" in text and "of bob" in text
        assert "<form" not in text and 'http-equiv="refresh"' in text

    served(scenario, echo, asker)

"""The page and the metrics show what runs, and nothing of a user's text becomes markup."""

from __future__ import annotations

import re
from urllib.parse import quote

from prometheus_client.parser import text_string_to_metric_families

from holdfast import Host
from holdfast.host import PROMISES
from holdfast.server import metrics
from tests.server.live import Live, echo, served

MARKUP = '<script>alert("1")</script>&\'"'


def test_the_page_escapes_everything_and_allows_no_script() -> None:
    async def scenario(server: Live) -> None:
        key = quote(MARKUP.replace("/", ""), safe="")
        await server.post(key, MARKUP, query="?wait=10")
        answer = await server.http.get("/")
        assert "&lt;script&gt;alert(&quot;1&quot;)" in answer.text
        assert "<script" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script" not in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"

    served(scenario)


def test_the_page_shows_what_runs_and_the_lines_to_paste() -> None:
    async def scenario(server: Live) -> None:
        receipt = await server.begun("alice")
        await server.post("alice", "waits")
        text = (await server.http.get("/")).text
        assert "alice" in text
        assert receipt["run_id"] in text
        assert re.search(r"<b class=\"busy\">1</b><span>runs now", text)
        assert re.search(r"<b class=\"\">1</b><span>messages waiting", text)
        assert f"curl -s &#x27;{server.url}/v1/sessions/alice/messages?wait=30&#x27;" in text
        assert f"holdfast.Client(&quot;{server.url}&quot;)" in text
        for number in PROMISES:
            assert f">{number} " in text

    served(scenario)


def test_a_user_sees_only_its_own_on_the_page() -> None:
    async def scenario(server: Live) -> None:
        await server.post("of-local", query="?wait=10")
        _, secret = await server.app.keys.create(principal="alice", role="user")
        text = (await server.http.get("/", headers={"authorization": f"Bearer {secret}"})).text
        assert "of-local" not in text
        assert "Incidents" not in text
        assert "$HOLDFAST_KEY" in text
        assert secret not in text

    served(scenario)


def test_the_metrics_can_be_read_by_prometheus() -> None:
    async def scenario(server: Live) -> None:
        await server.post("alice", query="?wait=10")
        await server.http.get("/v1/sessions/nobody")
        answer = await server.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        assert len(families["holdfast_promise_kept"].samples) == len(PROMISES)
        answers = {sample.labels["status"]: sample.value for sample in families["holdfast_http_answers"].samples}
        assert (answers["200"], answers["404"]) == (1, 1)
        counts = {sample.labels["name"]: sample.value for sample in families["holdfast_events"].samples}
        assert counts["runs_completed"] == 1

    served(scenario)


def test_a_label_is_escaped() -> None:
    host = Host(echo, store="memory://")
    host.incidents.counts['odd "name"\n\\'] = 1
    text = metrics.render(host.statistics(), streams=0, answers={})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["holdfast_events"].samples[0].labels["name"] == 'odd "name"\n\\'


def test_the_page_refuses_in_the_documented_shape_and_asks_a_browser_for_the_key() -> None:
    async def scenario(server: Live) -> None:
        await server.app.keys.create(principal="alice", role="user")
        answer = await server.http.get("/")
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["code"] == "unauthenticated"
        assert answer.headers["www-authenticate"].startswith("Basic ")

    served(scenario)

"""The bodies of the HTTP API lose nothing of the values that they carry."""

from __future__ import annotations

import msgspec

from holdfast.protocol.http import ScheduleBody, SendBody
from holdfast.protocol.messages import Attachment
from holdfast.protocol.schedules import ScheduleKeywords, ScheduleSpec
from holdfast.protocol.send_options import SendKeywords, SendOptions

DIGEST = "0" * 64


def test_send_options_survive_the_way_to_the_server() -> None:
    options = SendOptions(
        policy="collect",
        idempotency_key="k",
        agent="echo",
        quiet_s=1.5,
        max_wait_s=3.0,
        attachments=[Attachment(digest=DIGEST, media_type="image/png", name="a.png", size_bytes=3)],
    )
    sent = msgspec.json.decode(msgspec.json.encode(SendBody.of("hi", options)), type=SendBody)
    assert (sent.content, sent.options()) == ("hi", options)


def test_an_attachment_may_be_named_by_its_digest() -> None:
    body = msgspec.json.decode(b'{"content":"hi","attachments":["%b"]}' % DIGEST.encode(), type=SendBody)
    assert body.options().attachments == [Attachment(digest=DIGEST, media_type="")]


def test_a_schedule_survives_the_way_to_the_server() -> None:
    spec = ScheduleSpec(
        session="s",
        text="tick",
        agent="echo",
        overlap="steer",
        cron="0 8 * * *",
        timezone="Europe/Berlin",
        initial_delay_s=2.0,
        jitter_s=1.0,
        max_runs=9,
        miss="burst",
    )
    sent = msgspec.json.decode(msgspec.json.encode(ScheduleBody.of(spec, "daily")), type=ScheduleBody)
    assert (sent.schedule_id, sent.spec()) == ("daily", spec)


def test_a_body_without_options_has_only_what_it_must_say() -> None:
    assert msgspec.json.encode(SendBody.of("hi", SendOptions())) == b'{"content":"hi"}'


def test_the_keywords_are_the_fields_of_their_values() -> None:
    assert SendKeywords.__annotations__.keys() == set(SendOptions.__struct_fields__)
    assert ScheduleKeywords.__annotations__.keys() | {"session", "text"} == set(ScheduleSpec.__struct_fields__)

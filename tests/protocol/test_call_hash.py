"""An approval is bound to all of the call that was shown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.errors import InvalidRequest
from holdfast.protocol.call_hash import hash_call, hash_of, is_for_another_call
from holdfast.protocol.events import encode_json
from holdfast.protocol.messages import Access, Answer, Question

SHOWN = Question(
    question_id="q_1", kind="approval", text="May pay be called?", tool="pay", arguments={"to": "ann", "sum": 5}
)


@pytest.mark.parametrize(
    "change",
    [
        {"question_id": "q_2"},
        {"text": "May it?"},
        {"tool": "pay_all"},
        {"arguments": {"to": "ann", "sum": 50}},
        {"arguments": {"to": "ann"}},
        {"arguments": {"to": "ann", "sum": "5"}},
        {"access": Access(write=("/notes",))},
    ],
)
def test_a_call_that_differs_in_anything_has_another_hash(change: dict[str, Any]) -> None:
    other = msgspec.structs.replace(SHOWN, **change)
    assert hash_call(other) != hash_call(SHOWN)
    approved = Answer(question_id="q_1", decision="approved", call_hash=hash_call(SHOWN))
    assert is_for_another_call(approved, other)
    assert not is_for_another_call(approved, SHOWN)


def test_neither_the_order_of_the_arguments_nor_storing_changes_it() -> None:
    assert hash_call(msgspec.structs.replace(SHOWN, arguments={"sum": 5, "to": "ann"})) == hash_call(SHOWN)
    stored = msgspec.json.decode(encode_json(SHOWN), type=Question)
    assert hash_call(stored) == hash_call(SHOWN)
    odd = msgspec.structs.replace(SHOWN, arguments={"to": "\ud800", "sum": 1e300})
    assert hash_call(msgspec.json.decode(encode_json(odd), type=Question)) == hash_call(odd)


def test_an_id_alone_says_nothing_of_what_was_shown() -> None:
    assert hash_of(SHOWN, None) == hash_of("q_1", hash_call(SHOWN)) == hash_call(SHOWN)
    with pytest.raises(InvalidRequest):
        hash_of("q_1", None)


def test_a_denial_is_for_no_call() -> None:
    assert not is_for_another_call(Answer(question_id="q_1", decision="denied", call_hash="0" * 32), SHOWN)


def test_the_hash_covers_each_part_of_the_access() -> None:
    small = msgspec.structs.replace(SHOWN, access=Access(write=("/notes/a",)))
    for access in (Access(write=("/notes",)), Access(read=("/notes/a",)), Access(hosts=("a:443",)), Access()):
        assert hash_call(msgspec.structs.replace(SHOWN, access=access)) != hash_call(small)

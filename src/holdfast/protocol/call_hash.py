"""The hash that binds an approval to the call that a person saw."""

from __future__ import annotations

import hashlib

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.protocol.events import encode_json
from holdfast.protocol.messages import Answer, Question

__all__ = ["hash_call", "hash_of", "is_for_another_call", "question_id_of"]

_BYTES = 16  # 128 bits: an agent that forges both calls needs about 2**64 tries for a collision


def hash_call(question: Question) -> str:
    """Return the hash of a call that needs approval, as 32 hexadecimal digits.

    The hash covers the question's id, tool, arguments, text and access. It does not depend on the order of the
    arguments, and is the same before and after the question is stored.
    """
    asked: list[object] = [question.question_id, question.tool, question.text, question.arguments]
    if question.access:  # older versions stored questions without an access, and their hashes stay valid
        asked.append(question.access)
    stored = msgspec.json.decode(encode_json(asked))
    return hashlib.sha256(msgspec.json.encode(stored, order="sorted")).hexdigest()[: 2 * _BYTES]


def is_for_another_call(answer: Answer, question: Question) -> bool:
    """Return whether `answer` approves a call other than the one that `question` describes."""
    return answer.decision == "approved" and answer.call_hash not in ("", hash_call(question))


def question_id_of(question: Question | str) -> str:
    """Return the id of a question that is given as a `Question` or by its id."""
    return question.question_id if isinstance(question, Question) else question


def hash_of(question: Question | str, call_hash: str | None) -> str:
    """Return the hash that binds an approval to a call: `call_hash` if given, otherwise the hash of the question.

    Raises:
        InvalidRequest: if `question` is an id and `call_hash` is missing, so that the approved call is unknown.
    """
    if call_hash:
        return call_hash
    if isinstance(question, Question):
        return hash_call(question)
    raise InvalidRequest(
        f"the approval of {question[:80]!r} has no call_hash, so it is not bound to a call",
        hint="pass the question itself, or its call_hash",
    )

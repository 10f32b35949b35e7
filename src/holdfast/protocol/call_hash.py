"""The hash that binds an approval to the call that a person saw."""

from __future__ import annotations

import hashlib

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.protocol.events import encode_json
from holdfast.protocol.messages import Answer, Question

__all__ = ["hash_call", "hash_of", "is_for_another_call", "question_id_of"]

_BYTES = 16  # 128 bits: an agent that makes up both calls needs 2**64 tries for two of one hash


def hash_call(question: Question) -> str:
    """Return the hash of what an approval asks for: its id, its tool, its arguments and its words. 32 hex digits.

    It is the same before and after the question was stored, whatever the order of the arguments.
    """
    asked = [question.question_id, question.tool, question.text, question.arguments]
    stored = msgspec.json.decode(encode_json(asked))
    return hashlib.sha256(msgspec.json.encode(stored, order="sorted")).hexdigest()[: 2 * _BYTES]


def is_for_another_call(answer: Answer, question: Question) -> bool:
    """Return whether an approval was given for another call than the one that is about to be made."""
    return answer.decision == "approved" and answer.call_hash not in ("", hash_call(question))


def question_id_of(question: Question | str) -> str:
    """Return the id of a question that is given as such or by its id."""
    return question.question_id if isinstance(question, Question) else question


def hash_of(question: Question | str, call_hash: str | None) -> str:
    """Return the hash that an approval is bound to: of the question as it was shown, or the one that was named.

    Raises:
        InvalidRequest: an id came without a hash: nothing says which call was shown.
    """
    if call_hash:
        return call_hash
    if isinstance(question, Question):
        return hash_call(question)
    raise InvalidRequest(
        f"an approval of {question[:80]!r} does not say which call was shown",
        hint="give the question itself, or its call_hash",
    )

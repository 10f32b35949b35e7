"""Access beyond the wall of a call: what the call asks for, and what people grant.

Invariants
- An `Access` names each path, host and secret precisely. It has no patterns, so a person who reads it has read all of
  it. Characters that a terminal or page would hide are refused, not escaped.
- A call asks for at most `ITEMS_LIMIT` items, so a question stays short enough to be read.
- `is_covered` compares names only and follows no links. The code that opens a granted path refuses links on it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

from holdfast.errors import InvalidArguments
from holdfast.protocol.messages import Access, Question, Value

__all__ = [
    "ITEMS_LIMIT",
    "NO_REQUEST",
    "AccessRequest",
    "access_items",
    "approval_question",
    "describe",
    "is_covered",
    "join",
    "read_access",
]

ITEMS_LIMIT = 16
"""Maximum number of paths, hosts and secrets that one call may ask for."""
_PATH_CHARACTERS = 1_000
_HOST = re.compile(
    r"(?=[^:]{1,253}(?::|$))[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*(?::\d{1,5})?"
)
_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_HTTPS = 443
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories of characters that are invisible or change how other characters are displayed."""
_FIELDS = ("read", "write", "hosts", "secrets")


class AccessRequest(Value, frozen=True, kw_only=True):
    """The access that a call asks for beyond its wall.

    Parameters:
        access: the access; empty if the call asks for nothing.
        text: description of the access for the person who is asked.
    """

    access: Access = Access()
    text: str = ""


NO_REQUEST = AccessRequest()
"""The request of a call that stays inside its wall."""


def read_access(given: object) -> Access:
    """Convert the argument ``access`` of a call to an `Access`; paths stay as given.

    Parameters:
        given: object with the optional lists ``read``, ``write``, ``hosts`` and ``secrets``; None means no access.

    Raises:
        InvalidArguments: if `given` has another form, too many items, or an item that is not a precise name.
    """
    if given is None:
        return Access()
    if not isinstance(given, dict) or any(name not in _FIELDS for name in given):
        raise InvalidArguments(f"access is an object with the lists {', '.join(_FIELDS)}")
    lists = {name: _texts(name, given.get(name)) for name in _FIELDS}
    if sum(map(len, lists.values())) > ITEMS_LIMIT:
        raise InvalidArguments(f"access has more than {ITEMS_LIMIT} items; ask for a folder instead of its files")
    return Access(
        read=_unique(map(_path, lists["read"])),
        write=_unique(map(_path, lists["write"])),
        hosts=_unique(map(_host, lists["hosts"])),
        secrets=_unique(map(_secret, lists["secrets"])),
    )


def _texts(name: str, items: object) -> list[str]:
    if items is None:
        return []
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise InvalidArguments(f"access.{name} is a list of strings")
    if len(items) > ITEMS_LIMIT:
        raise InvalidArguments(f"access has more than {ITEMS_LIMIT} items; ask for a folder instead of its files")
    return list(items)


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))


def _path(text: str) -> str:
    if not text.strip() or len(text) > _PATH_CHARACTERS:
        raise InvalidArguments(f"a path in access has 1 to {_PATH_CHARACTERS:,} characters")
    if any(unicodedata.category(character) in _HIDDEN for character in text):
        raise InvalidArguments(f"the path {text!r} in access has invisible characters, which a person cannot review")
    return text


def _host(text: str) -> str:
    host = text.lower()
    if not _HOST.fullmatch(host):
        raise InvalidArguments(f"{text[:100]!r} is not a host; write a name and a port, such as api.example.org:443")
    name, _, port = host.partition(":")
    if port and not 0 < int(port) < 65_536:
        raise InvalidArguments(f"{text[:100]!r} has no valid port; choose 1 to 65535")
    return f"{name}:{int(port) if port else _HTTPS}"


def _secret(text: str) -> str:
    if not _SECRET.fullmatch(text):
        raise InvalidArguments(f"{text[:100]!r} is not the name of a secret")
    return text


def join(*parts: Access) -> Access:
    """Return the access that all parts together give."""
    return Access(**{name: _unique(item for part in parts for item in getattr(part, name)) for name in _FIELDS})


def is_covered(asked: Access, granted: Access) -> bool:
    """Return whether `granted` gives all that `asked` asks for. Access to a folder covers everything below it."""
    return (
        all(_is_below(path, granted.write) for path in asked.write)
        and all(_is_below(path, (*granted.read, *granted.write)) for path in asked.read)
        and set(asked.hosts) <= set(granted.hosts)
        and set(asked.secrets) <= set(granted.secrets)
    )


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def describe(access: Access, *, root: str = "") -> str:
    """Return what an access gives, in words for a person, as one line.

    Parameters:
        root: folder whose path is left out of the paths below it.
    """
    return "; ".join("".join(item) for item in access_items(access, root=root))


def access_items(access: Access, *, root: str = "") -> list[tuple[str, str, str]]:
    """Return each item of an access, in words for a person: what is done, with what, and what else is to know.

    Parameters:
        root: folder whose path is left out of the paths below it.
    """
    return [
        *(("read ", _shown(path, root), "") for path in access.read),
        *(("write to ", _shown(path, root), ", which this session did not make") for path in access.write),
        *(("reach ", host, "") for host in access.hosts),
        *(("get the secret ", name, "") for name in access.secrets),
    ]


def _shown(path: str, root: str) -> str:
    if root and path == root:
        return "the whole workspace"
    return path.removeprefix(f"{root.rstrip('/')}/") if root else path


def approval_question(call_id: str, tool: str, arguments: Any, request: AccessRequest) -> Question:
    """Return the question with which a person is asked to approve a call, and what the call asks for."""
    return Question(
        question_id=call_id,
        kind="approval",
        text=f"May {tool} be called{f' and {request.text}' if request.text else ''}?",
        tool=tool,
        arguments=arguments,
        access=request.access,
    )

"""What is logged: once, with a traceback, without secrets, and without lines that it does not have."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import ids
from holdfast.cli import output
from holdfast.errors import Interrupted
from holdfast.logs import RedactingFormatter, is_logged, log_failure, one_line, redact, visible
from holdfast.protocol.stopping import Cause
from holdfast.server import page_parts

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJib2IifQ.dozjgNryP4J3jVmNHl0w5N"

SECRETS = [
    ("our key hf_" + "a1" * 16, "a1a1a1"),
    ("our token hft_" + "b2" * 16, "b2b2b2"),
    ("our approval key hfa_" + "c3" * 16, "c3c3c3"),
    ("{'approval_key': 'typed by hand'}", "typed"),
    ("Authorization: Bearer abcdefgh12345678", "abcdefgh"),
    ("authorization: token zzzyyyxxx111", "zzzyyy"),
    ("{'Authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz"),
    ("curl -u bob:hunter2 https://x.example", "hunter2"),
    ("Cookie: session=deadbeef; other=1", "deadbeef"),
    ("postgresql://app:hunter2@db:5432/x", "hunter2"),
    ("redis://:hunter2@cache/0", "hunter2"),
    ("https://ghtoken1234567890abcdef@github.example/x.git", "ghtoken1234"),
    ("password=hunter2", "hunter2"),
    ("sleep 777 # password=hunter2", "hunter2"),
    ("PGPASSWORD=hunter2 psql", "hunter2"),
    ("DB_PASSWORD: 'hunter2 and more'", "and more"),
    ('{"password": "hun\\"ter2", "user": "bob"}', "ter2"),
    ("{'client_secret': 'hunter2'}", "hunter2"),
    ("mysql --password hunter2 -h db", "hunter2"),
    ("tool --api-key=hunter2", "hunter2"),
    ("tool --token hunter2", "hunter2"),
    ("['tool', '--password', 'hunter2']", "hunter2"),
    ("sshpass -p hunter2 ssh x", "hunter2"),
    ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtn"),
    ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN"),
    ("sk-ant-api03-abcdefghijklmnop", "abcdefghijkl"),
    ("sk-proj-abcdefghijklmnopqrst", "abcdefghijkl"),
    ("sk_live_4eC39HqLyjWDarjtT1", "4eC39Hq"),
    ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "abcdefghijkl"),
    ("xoxb-1234567890-abcdefghij", "abcdefghij"),
    ("AIza" + "Sy1234567890abcdefghijklmnopqrstuvw", "Sy123456"),
    ("https://x.example/y?a=1&key=hunter22&b=2", "hunter22"),
    ("https://x.example/y?token=hunter22", "hunter22"),
    ("https://s3.example/y?X-Amz-Signature=abcdef0123", "abcdef0123"),
    (f"it was {JWT}", "eyJzdWIi"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "MIIEow"),
    ("-----BEGIN PRIVATE KEY-----\nMIIEow", "MIIEow"),
]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_a_secret_is_taken_out(text: str, secret: str) -> None:
    assert secret in text
    assert secret not in redact(text)
    assert "***" in redact(text)


@pytest.mark.parametrize("prefix", ["hf_", "hft_", "hfa_"])
def test_our_own_secrets_are_taken_out(prefix: str) -> None:
    secret = ids.secret(prefix)
    assert redact(f"<{secret}>") == "<***>"


@pytest.mark.parametrize(
    "text",
    [
        "nothing to hide",
        "the run used 500 tokens of 1,000",
        "max_tokens=4096 input_tokens=12",
        "unexpected token: }",
        "http://127.0.0.1:8420/v1/sessions?after=0",
        "KeyError: 'name'",
        "session 'alice', run 'r_0123456789abcdef'",
        "idempotency_key=abc",
        "see https://user.example/@bob",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


def test_values_of_secret_variables_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "unguessable-form")
    assert redact("it was unguessable-form.") == "it was ***."


@given(st.text(max_size=300))
def test_it_never_fails_and_what_is_redacted_stays_so(text: str) -> None:
    once = redact(text)
    assert redact(once).count("hf_aaaaaaaa") == 0
    assert visible(visible(once)) == visible(once)


@pytest.mark.parametrize(
    "piece",
    ["password=", "-----BEGIN PRIVATE KEY-----", "://a:", "eyJaaaaaa.", "--password ", "bearer ", "\\\"'", "a-"],
)
def test_long_hostile_text_takes_no_long_time(piece: str) -> None:
    began = time.process_time()
    redact(piece * (50_000 // len(piece)))
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("spell", [visible, output.visible, page_parts.show_invisible])
def test_letters_that_nobody_sees_are_spelled_out_in_the_log_and_where_people_approve(
    spell: Callable[[str], str],
) -> None:
    for hidden in "\u034f\u115f\u1160\u17b4\u180b\u200b\u202e\u2800\u3164\ufe0f\uffa0\U000e0100":
        shown = spell(f"rm{hidden}x")
        assert shown.isascii() and f"{ord(hidden):x}" in shown.lower()


def test_what_is_hidden_or_turns_text_is_spelled_out() -> None:
    shown = visible("a\x1b[2Jb\rc\u202ed\u200be\x9bf\ttab\nline\ud800")
    assert shown == "a\\x1b[2Jb\\x0dc\\u202ed\\u200be\\x9bf\ttab\nline\\ud800"


class Handled(logging.Handler):
    """What an application's own handler gets, formatted as Python does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.text += logging.Formatter("%(levelname)s %(name)s %(message)s").format(record) + "\n"


@pytest.fixture
def handled() -> Iterator[Handled]:
    handler = Handled()
    logger = logging.getLogger("holdfast.trial")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


LOG = logging.getLogger("holdfast.trial")


def test_a_failure_is_logged_once_with_traceback_and_whose_it_is(handled: Handled) -> None:
    error = raised(ValueError("no such file"))
    for _ in range(2):
        log_failure(LOG, "tool 'read' failed", error, principal="bob", session="inbox", run_id="r_1")
    (record,) = handled.records
    assert record.levelno == logging.ERROR
    assert (record.principal, record.session, record.run_id) == ("bob", "inbox", "r_1")  # type: ignore[attr-defined]
    assert "tool 'read' failed: ValueError: no such file" in record.getMessage()
    assert "principal 'bob', session 'inbox', run 'r_1'" in record.getMessage()
    assert "Traceback (most recent call last)" in handled.text
    assert "in raised" in handled.text
    assert record.exc_info is None, "its objects would tell a handler what was taken out"


def test_an_interrupt_is_no_failure(handled: Handled) -> None:
    log_failure(LOG, "run", Interrupted(Cause(kind="user", reason="", origin="x", at=0.0)))
    assert handled.records == []


def test_secrets_and_forged_lines_do_not_pass_through_the_handlers_of_others(handled: Handled) -> None:
    text = "password=hunter2\r\n2026-01-01T00:00:00Z INFO holdfast: all is well\x1b[2J\u202e"
    error = raised(RuntimeError(text))
    error.add_note("api_key=hunter2\nERROR forged")
    log_failure(LOG, "run failed\nERROR forged", error, session="a\u202eb")
    assert "hunter2" not in handled.text
    assert not {"\r", "\x1b", "\u202e"} & set(handled.text)
    lines = handled.text.splitlines()
    assert all(line.startswith("  | ") for line in lines[1:]), lines


def test_the_cause_that_was_logged_before_is_not_logged_again(handled: Handled) -> None:
    inner = raised(ValueError("the inner one"))
    log_failure(LOG, "tool", inner)
    try:
        raise RuntimeError("the outer one") from inner
    except RuntimeError as outer:
        log_failure(LOG, "run", outer)
    assert len(handled.records) == 2
    assert handled.text.count("the inner one") == 2, "in its own record's line and traceback only"
    assert "the outer one" in handled.text


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def __getattribute__(self, name: str) -> object:
        if name.startswith("_holdfast"):
            raise ZeroDivisionError
        return super().__getattribute__(name)


def test_a_hostile_error_is_logged_all_the_same(handled: Handled) -> None:
    error = raised(Hostile())
    log_failure(LOG, "run", error)
    log_failure(LOG, "run", error)
    assert len(handled.records) == 1
    assert is_logged(error)
    assert "Hostile" in handled.text


def test_a_traceback_is_bounded(handled: Handled) -> None:
    log_failure(LOG, "run", raised(ValueError("x" * 1_000_000)))
    assert len(handled.text) < 20_000, "it is redacted on the loop"


def test_one_line_is_one_line_redacted_and_bounded() -> None:
    assert one_line(ValueError("a\nb  password=hunter2 \x1b[1m")) == "ValueError: a b password=*** \\x1b[1m"
    assert len(one_line(ValueError("y" * 100_000))) == 500


def test_a_records_further_lines_are_marked_as_its_own() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(RedactingFormatter())
    record = logging.LogRecord("x", 30, "", 1, "first\n2026-01-01T00:00:00Z ERROR x: forged", (), None)
    record.exc_info = (ValueError, raised(ValueError("token=hunter2")), None)
    handler.handle(record)
    first, *rest = out.getvalue().splitlines()
    assert "first" in first
    assert rest and all(line.startswith("  | ") for line in rest)
    assert "hunter2" not in out.getvalue()


PROGRAM = """
import sys, threading, warnings
from holdfast.logs import configure_logging, install_hooks
configure_logging("info")
install_hooks()
class Bad:
    def __del__(self): raise ValueError("del password=hunter2")
def work(): raise ValueError("thread password=hunter2\\nERROR forged")
thread = threading.Thread(target=work, name="w"); thread.start(); thread.join()
bad = Bad(); del bad
warnings.warn("warned password=hunter2")
raise ValueError("main password=hunter2")
"""


def test_threads_destructors_warnings_and_the_end_of_the_process_go_through_the_log() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "hunter2" not in done.stderr
    for word in ("thread 'w' failed: ValueError: thread", "ValueError: del", "warned", "ValueError: main"):
        assert word in done.stderr, word
    assert [line for line in done.stderr.splitlines() if line.startswith("ERROR forged")] == []

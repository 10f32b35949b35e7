"""Settings come from the file, the environment and flags, in that rising order, and what does not fit is named."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import ConfigurationError
from holdfast.settings import Settings, describe, load_settings


def test_later_sources_win(tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text(
        'port = 1\ngrace_s = 1\ndrain_timeout_s = 1.5\nallowed_hosts = ["a", "b"]\n'
    )
    environ = {"HOLDFAST_GRACE_S": "2", "HOLDFAST_DRAIN_TIMEOUT_S": " 2.5 ", "OTHER": "x", "HOLDFAST_KEY": "hf_x"}
    found = load_settings({"drain_timeout_s": 3, "store": None, "host": "::1"}, environ=environ, folder=tmp_path)
    assert (found.port, found.grace_s, found.drain_timeout_s, found.host) == (1, 2.0, 3.0, "::1")
    assert (found.allowed_hosts, found.store) == (("a", "b"), f"sqlite:///{tmp_path}/.holdfast/holdfast.db")
    assert isinstance(found.grace_s, float)


def test_the_store_lies_beside_the_settings_file_unless_only_an_older_version_made_one(tmp_path: Path) -> None:
    own, old = tmp_path / ".holdfast" / "holdfast.db", tmp_path / "holdfast.db"
    config = tmp_path / "holdfast.toml"
    config.touch()
    environ = {"HOLDFAST_CONFIG": str(config)}
    assert load_settings(environ=environ).store == f"sqlite:///{own}"
    assert load_settings(environ={}).store == Settings().store == "sqlite:///.holdfast/holdfast.db"
    old.touch()
    assert load_settings(environ=environ).store == f"sqlite:///{old}"
    assert load_settings({"store": "sqlite:///x.db"}, environ=environ).store == "sqlite:///x.db"
    own.parent.mkdir()
    own.touch()
    assert load_settings(environ=environ).store == f"sqlite:///{own}"


def test_lists_in_the_environment_are_separated_by_commas(tmp_path: Path) -> None:
    found = load_settings(environ={"HOLDFAST_ALLOWED_ORIGINS": "https://a, https://b,"}, folder=tmp_path)
    assert found.allowed_origins == ("https://a", "https://b")


@pytest.mark.parametrize(
    ("flags", "environ", "file", "parts"),
    [
        ({"port": "x"}, {}, "", ["port", "'x'", "--port"]),
        ({"port": 70_000}, {}, "", ["port", "70000", "--port"]),
        ({"prot": 1}, {}, "", ["prot", "the command line", "port"]),
        ({}, {"HOLDFAST_GRACE_S": "-1"}, "", ["grace_s", "'-1'", "HOLDFAST_GRACE_S"]),
        ({}, {"HOLDFAST_GRACE_S": "nan"}, "", ["grace_s", "HOLDFAST_GRACE_S"]),
        ({}, {"HOLDFAST_DRAIN_TIMEOUT_S": "inf"}, "", ["drain_timeout_s", "HOLDFAST_DRAIN_TIMEOUT_S"]),
        ({}, {"HOLDFAST_PROT": "1"}, "", ["HOLDFAST_PROT", "HOLDFAST_PORT"]),
        ({}, {"HOLDFAST_LOG_LEVEL": "loud"}, "", ["log_level", "loud"]),
        ({}, {}, 'port = "8420"', ["port", "'8420'", "holdfast.toml"]),
        ({}, {}, "prot = 1", ["prot", "holdfast.toml", "'port'"]),
        ({}, {}, "port = ", ["holdfast.toml", "not valid TOML"]),
        ({}, {}, "drain_timeout_s = inf", ["drain_timeout_s", "finite"]),
        ({}, {"HOLDFAST_CONFIG": "/no/such/file.toml"}, "", ["/no/such/file.toml", "no such file"]),
    ],
)
def test_what_does_not_fit_names_the_setting_the_value_and_the_source(
    flags: dict[str, object], environ: dict[str, str], file: str, parts: list[str], tmp_path: Path
) -> None:
    if file:
        (tmp_path / "holdfast.toml").write_text(file)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(flags, environ=environ, folder=tmp_path)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("log_level", "loud", "log_level='loud' (from --log-level): choose debug, info, warning or error"),
        ("port", "x", "port='x' (from --port): use a whole number from 0 to 65535"),
        ("port", 70_000, "port=70000 (from --port): use a whole number from 0 to 65535"),
        ("max_runs", "0", "max_runs='0' (from --max-runs): use a whole number of at least 1, without quotes"),
        ("memory_limit_bytes", 5, "memory_limit_bytes=5 (from --memory-limit-bytes): use a whole number of at least"),
        ("grace_s", "nan", "grace_s='nan' (from --grace-s): use a finite number of at least 0"),
        ("keepalive_s", 0, "keepalive_s=0 (from --keepalive-s): use a finite number above 0"),
        ("debuggers", "perhaps", "debuggers='perhaps' (from --debuggers): use true or false"),
        ("host", "", "host='' (from --host): use a text that is not empty"),
        ("jwt_issuer", 3, "jwt_issuer=3 (from --jwt-issuer): use a text"),
        ("allowed_hosts", "a", None),
        ("allowed_hosts", 3, "allowed_hosts=3 (from --allowed-hosts): use a list of texts"),
    ],
)
def test_what_does_not_fit_is_answered_with_what_would(name: str, value: object, message: str | None) -> None:
    if message is None:
        load_settings({name: value}, environ={})
        return
    with pytest.raises(ConfigurationError) as caught:
        load_settings({name: value}, environ={})
    assert caught.value.message.startswith(f"invalid setting {message}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not readable"):
        load_settings(environ={}, folder=tmp_path)


def test_arguments_are_checked_too() -> None:
    with pytest.raises(ConfigurationError, match="max_runs"):
        Settings(max_runs=0)
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]


def test_a_hint_tells_what_the_setting_is_for_whatever_the_words_of_its_description() -> None:
    for wrong, told in (
        ({"port": "x"}, "port: port to listen on; 0"),
        ({"jwt_issuer": 3}, "jwt_issuer: required `iss`"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            load_settings(wrong, environ={})
        assert caught.value.hint.startswith(told)


def test_every_setting_is_described_with_a_default_that_fits() -> None:
    rows = describe()
    assert [row.name for row in rows] == list(Settings.__struct_fields__)
    for row in rows:
        assert row.doc
        assert row.variable == f"HOLDFAST_{row.name.upper()}"
    written = "\n".join(f"{row.name} = {row.default}" for row in rows)
    assert msgspec.convert(tomllib.loads(written), Settings) == Settings()

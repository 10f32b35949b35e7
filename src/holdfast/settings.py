"""Every setting of a host and its server, with its default and meaning, and the one way in which they are read.

A setting comes from ``holdfast.toml``, then ``HOLDFAST_<NAME>``, then a flag or argument; the later one wins. What does
not fit is a `ConfigurationError` that names the setting, the value and where it came from. The table of defaults in the
docs is generated from `describe()`.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.errors import ConfigurationError

__all__ = [
    "CONFIG_FILE",
    "DATA_FOLDER",
    "DEFAULT_STORE",
    "SettingInfo",
    "Settings",
    "config_file",
    "data_folder",
    "default_store",
    "describe",
    "load_settings",
    "names_store",
]

CONFIG_FILE = "holdfast.toml"
DATA_FOLDER = ".holdfast"
"""Where the store, its side files and the workspaces lie, beside the settings file."""
_STORE_NAME = "holdfast.db"
DEFAULT_STORE = f"sqlite:///{DATA_FOLDER}/{_STORE_NAME}"
_PREFIX = "HOLDFAST_"
_SECRET_LENGTH = 32
_NOT_SETTINGS = frozenset(("HOLDFAST_CONFIG", "HOLDFAST_URL", "HOLDFAST_KEY", "HOLDFAST_SESSION"))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a host and its server. Durations are in seconds; the field descriptions are the documentation.

    Raises:
        ConfigurationError: a value of the wrong type or out of range.
    """

    # Where it listens and what it keeps
    host: Annotated[
        str,
        Meta(min_length=1, description="address to listen on; any but a loopback address needs API keys"),
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8420
    store: Annotated[
        str,
        Meta(
            min_length=1,
            description="where sessions are kept: `sqlite:///<file>` or `memory://`; "
            "the default lies beside `holdfast.toml`",
        ),
    ] = DEFAULT_STORE
    agent: Annotated[
        str, Meta(min_length=1, description="agent of `holdfast serve` as `module:name`; the demo by default")
    ] = "holdfast.agents.demo:agent"
    debuggers: Annotated[
        bool,
        Meta(description="let debuggers, profilers and core dumps of the same user read the memory of the server"),
    ] = False
    worker_variables: Annotated[
        tuple[str, ...],
        Meta(
            description='names or patterns of environment variables that processes of `isolation="process"` get '
            "besides what an interpreter needs"
        ),
    ] = ()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severity of what is logged")
    ] = "info"

    # Stopping
    grace_s: Annotated[float, Meta(ge=0, description="time that a run has for its clean-up after an interrupt")] = 5.0
    kill_after_s: Annotated[
        float, Meta(ge=0, description="time after the grace until what is left is abandoned and named")
    ] = 2.0
    drain_s: Annotated[float, Meta(ge=0, description="time that runs have to finish when the host shuts down")] = 30.0
    stop_wait_s: Annotated[
        float, Meta(ge=0, description="longest wait of an HTTP stop for its receipt; then 202 and a stop id")
    ] = 15.0

    # Deadlines of work
    tool_s: Annotated[float, Meta(gt=0, description="deadline of one call")] = 60.0
    step_s: Annotated[float, Meta(gt=0, description="deadline of one step")] = 120.0
    run_s: Annotated[float, Meta(gt=0, description="deadline of one run")] = 1800.0
    wait_limit_s: Annotated[float, Meta(gt=0, description="longest `?wait=` of an HTTP send")] = 300.0

    suspend_s: Annotated[float, Meta(gt=0, description="a question to a person counts as expired after this time")] = (
        7 * 86400.0
    )

    # Mailbox and policies
    mailbox_limit: Annotated[int, Meta(ge=1, description="messages that may wait in one session")] = 100
    mailbox_size: Annotated[
        int, Meta(ge=1024, description="characters that the messages that wait in one session may have in all")
    ] = 8_000_000
    quiet_s: Annotated[float, Meta(ge=0, description="`collect`: a batch is due when it was quiet for this long")] = 1.0
    max_wait_s: Annotated[
        float, Meta(ge=0, description="`collect`: a batch is due this long after its first message")
    ] = 10.0
    restart_limit: Annotated[
        int, Meta(ge=0, description="times that a run is restarted after crashes before it is given up")
    ] = 3

    # What is kept, and for how long
    event_retention_s: Annotated[
        float, Meta(gt=0, description="events of ended runs are kept this long; transcripts are kept for good")
    ] = 30 * 86400.0
    tombstone_s: Annotated[
        float,
        Meta(
            ge=0,
            description="a deleted session's key answers 410 this long; its contents are dropped at once",
        ),
    ] = 7 * 86400.0
    attachment_retention_s: Annotated[
        float, Meta(gt=0, description="an attachment that no session uses is kept this long after its upload")
    ] = 86400.0
    prune_every_s: Annotated[
        float, Meta(gt=0, description="time between two looks for what the store need not keep any longer")
    ] = 3600.0
    idempotency_s: Annotated[float, Meta(gt=0, description="idempotency keys are kept at least this long")] = (
        7 * 86400.0
    )
    evict_after_s: Annotated[
        float, Meta(gt=0, description="an idle session leaves the memory after this time; the store keeps it")
    ] = 60.0

    # Bounds
    max_runs: Annotated[int, Meta(ge=1, description="runs at the same time in this host")] = 1000
    principal_runs: Annotated[int, Meta(ge=1, description="runs at the same time of one principal")] = 100
    principal_threads: Annotated[int, Meta(ge=1, description="threads at the same time of one principal")] = 64
    principal_abandoned: Annotated[
        int, Meta(ge=1, description="abandoned threads of one principal before it gets no more threads")
    ] = 16
    principal_background: Annotated[
        int, Meta(ge=1, description="pieces of work that one principal's runs may have in the background")
    ] = 100
    principal_sessions: Annotated[int, Meta(ge=1, description="sessions of one principal")] = 100_000
    principal_schedules: Annotated[int, Meta(ge=1, description="schedules of one principal")] = 1000
    principal_rate_per_s: Annotated[
        float,
        Meta(ge=0, description="HTTP writes per second of one principal, with a burst of twice that; 0: no limit"),
    ] = 1000.0
    principal_streams: Annotated[int, Meta(ge=1, description="open event streams of one principal")] = 10_000
    memory_limit_bytes: Annotated[
        int,
        Meta(ge=1_000_000, description="bytes of large requests and answers that may be in memory at the same time"),
    ] = 128_000_000
    principal_memory_bytes: Annotated[
        int, Meta(ge=1_000_000, description="the share of one principal in memory_limit_bytes")
    ] = 32_000_000
    body_limit_bytes: Annotated[int, Meta(ge=1024, description="largest request body, in bytes")] = 1_000_000

    import_limit_bytes: Annotated[
        int, Meta(ge=1024, description="largest export that a session is begun with over HTTP, in bytes")
    ] = 50_000_000
    attachment_limit_bytes: Annotated[int, Meta(ge=1, description="largest attachment, in bytes")] = 20_000_000
    principal_attachments_bytes: Annotated[
        int, Meta(ge=1, description="what the attachments of one principal may take, in bytes")
    ] = 1_000_000_000

    principal_stored_bytes: Annotated[
        int,
        Meta(
            ge=1_000_000,
            description="what a principal may have stored in all, in bytes: messages, events, transcripts, attachments",
        ),
    ] = 10_000_000_000
    principal_fires_per_s: Annotated[
        float,
        Meta(ge=0, description="schedules of one principal that fire per second, the others later; 0: no limit"),
    ] = 100.0

    loop_block_s: Annotated[
        float,
        Meta(ge=0, description="an event loop that does not answer for this long is reported with its stack; 0: never"),
    ] = 1.0

    # HTTP
    keepalive_s: Annotated[float, Meta(gt=0, description="an idle event stream gets a comment line this often")] = 15.0
    stream_stall_s: Annotated[
        float, Meta(gt=0, description="an event stream whose reader takes nothing for this long is closed")
    ] = 60.0
    head_timeout_s: Annotated[
        float, Meta(gt=0, description="time that the head of a request has to come, the first one since the connection")
    ] = 10.0
    idle_connection_timeout_s: Annotated[
        float, Meta(gt=0, description="a connection without a request for this long is closed")
    ] = 75.0
    max_connections: Annotated[
        int,
        Meta(ge=1, description="open connections, as far as there are descriptors; a quarter of those stays free"),
    ] = 20_000
    principal_connections: Annotated[
        int,
        Meta(ge=1, description="open connections of one principal, or of all without a key; half of all at most"),
    ] = 10_000
    body_s: Annotated[float, Meta(gt=0, description="time that a request has to deliver its body")] = 30.0
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(description="names in `Host` that are answered besides loopback's and the address listened on"),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="origins of web pages that may call, such as `https://chat.example.org`")
    ] = ()

    public_agents: Annotated[
        tuple[str, ...],
        Meta(
            description="agents that keys and tokens without a list of their own may name, `*` for all; "
            "none here: the default agent only. Admin keys may name all"
        ),
    ] = ()

    # Signed tokens of an identity provider, beside API keys
    jwt_secret: Annotated[
        str, Meta(description="secret with which bearer tokens (JWT) are signed by HS256, 32 characters or more")
    ] = ""
    jwt_public_key: Annotated[
        str, Meta(description="public key of bearer tokens (JWT) signed by RS256: PEM text, or a file that has it")
    ] = ""
    jwt_issuer: Annotated[str, Meta(description="what a token's `iss` must be; empty: anything")] = ""
    jwt_audience: Annotated[
        str, Meta(description="what a token's `aud` must have; empty: tokens with an `aud` are refused")
    ] = ""

    def __post_init__(self) -> None:
        """Check values that were given as arguments."""
        for name in self.__struct_fields__:
            _convert(name, getattr(self, name), source="an argument", strict=True)


_TYPES: Mapping[str, Any] = {field.name: field.type for field in msgspec.structs.fields(Settings)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingInfo:
    """One row of the table of settings.

    Parameters:
        name: in ``holdfast.toml`` and as an argument.
        variable: the environment variable.
        type: its type, in words.
        default: its default, as it would be written in ``holdfast.toml``.
        doc: what it does.
    """

    name: str
    variable: str
    type: str
    default: str
    doc: str


def describe() -> tuple[SettingInfo, ...]:
    """All settings in their order, for the docs and ``holdfast serve --help``."""
    rows = []
    for field in msgspec.structs.fields(Settings):
        base, meta = field.type.__origin__, field.type.__metadata__[0]
        rows.append(
            SettingInfo(
                name=field.name,
                variable=_PREFIX + field.name.upper(),
                type=_type_name(base),
                default=_written(field.default),
                doc=meta.description,
            )
        )
    return tuple(rows)


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] = ".",
) -> Settings:
    """Read the settings: ``holdfast.toml``, then ``HOLDFAST_*``, then `flags`; later ones win.

    Parameters:
        flags: values from the command line by setting name; None stands for a flag that was not given.
        environ: the environment; the process's own by default. ``HOLDFAST_CONFIG`` names another file.
        folder: where ``holdfast.toml`` is looked for.

    Raises:
        ConfigurationError: a setting that does not exist or a value that does not fit; names it and its source.
    """
    environment = os.environ if environ is None else environ
    values = _read_values(flags or {}, environment, folder)
    values.setdefault("store", default_store(environ=environment, folder=folder))
    return Settings(**values)


def names_store(flags: Mapping[str, object]) -> bool:
    """Return whether `flags`, the environment or the settings file name a store. Raises as `load_settings`."""
    return "store" in _read_values(flags, os.environ, ".")


def config_file(environ: Mapping[str, str] | None = None, folder: str | os.PathLike[str] = ".") -> Path:
    """Return where the settings file is looked for; there need not be one."""
    named = (os.environ if environ is None else environ).get("HOLDFAST_CONFIG")
    return Path(named) if named else Path(folder) / CONFIG_FILE


def data_folder(environ: Mapping[str, str] | None = None, folder: str | os.PathLike[str] = ".") -> Path:
    """Return Holdfast's own folder, beside the settings file; there need not be one."""
    return config_file(environ, folder).parent / DATA_FOLDER


def default_store(*, environ: Mapping[str, str] | None = None, folder: str | os.PathLike[str] = ".") -> str:
    """Return the URL of the store that is used when none is named.

    That is the one in Holdfast's own folder; or, while that has none, the file ``holdfast.db`` that older versions made
    beside the settings file.
    """
    path = data_folder(environ, folder) / _STORE_NAME
    old = path.parent.parent / _STORE_NAME
    return f"sqlite:///{old if old.exists() and not path.exists() else path}"


def _read_values(
    flags: Mapping[str, object], environment: Mapping[str, str], folder: str | os.PathLike[str]
) -> dict[str, Any]:
    """Return the settings that were given, by name."""
    values: dict[str, Any] = {}
    path = config_file(environment, folder)
    for name, value in _read_file(path, required="HOLDFAST_CONFIG" in environment).items():
        if name not in _TYPES:
            raise _unknown(name, source=str(path))
        values[name] = _convert(name, value, source=str(path), strict=True)
    for variable, text in environment.items():
        name = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX) or variable in _NOT_SETTINGS:
            continue
        if name in _TYPES:
            values[name] = _from_text(name, text, source=variable)
        elif difflib.get_close_matches(name, _TYPES, n=1, cutoff=0.7):
            raise _unknown(name, source=variable)
    for name, flag in flags.items():
        if flag is None:
            continue
        if name not in _TYPES:
            raise _unknown(name, source="the command line")
        source = f"--{name.replace('_', '-')}"
        if isinstance(flag, str):
            values[name] = _from_text(name, flag, source=source)
        else:
            values[name] = _convert(name, flag, source=source, strict=True)
    return values


def _read_file(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigurationError(
                f"HOLDFAST_CONFIG names {path}, which does not exist", hint="correct the path or unset HOLDFAST_CONFIG"
            ) from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}", hint="check the file's owner, mode and encoding"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}", hint="correct that line") from error


def _from_text(name: str, text: str, *, source: str) -> Any:
    if getattr(_TYPES[name].__origin__, "__origin__", None) is tuple:
        return _convert(name, [part.strip() for part in text.split(",") if part.strip()], source=source, strict=True)
    return _convert(name, text.strip(), source=source, strict=False)


def _convert(name: str, value: object, *, source: str, strict: bool) -> Any:
    try:
        converted = msgspec.convert(value, _TYPES[name], strict=strict)
    except msgspec.ValidationError as error:
        reason = str(error)
    else:
        if name == "jwt_secret" and 0 < len(converted) < _SECRET_LENGTH:
            raise ConfigurationError(
                f"setting jwt_secret (from {source}) has {len(converted)} characters, which can be guessed",
                hint=f"use {_SECRET_LENGTH} random characters or more",
            )
        if not isinstance(converted, float) or math.isfinite(converted):
            return converted
        reason = "Expected a finite number"
    shown = "***" if name == "jwt_secret" else repr(value)
    raise ConfigurationError(
        f"setting {name} is {shown} (from {source}): {reason[:1].lower()}{reason[1:]}",
        hint=f"{name}: {_TYPES[name].__metadata__[0].description}; the default is {_default(name)}",
    )


def _unknown(name: str, *, source: str) -> ConfigurationError:
    near = difflib.get_close_matches(name, _TYPES, n=1)
    return ConfigurationError(
        f"there is no setting {name!r} (from {source})",
        hint=f"did you mean {near[0]!r}?" if near else "the reference lists all settings",
    )


def _default(name: str) -> str:
    return next(_written(field.default) for field in msgspec.structs.fields(Settings) if field.name == name)


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    if isinstance(value, tuple):
        return "[" + ", ".join(_written(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _type_name(base: Any) -> str:
    if base is str:
        return "text"
    if base is bool:
        return "true or false"
    if base is int:
        return "whole number"
    if base is float:
        return "number"
    if getattr(base, "__origin__", None) is tuple:
        return "list of texts"
    return "one of " + ", ".join(base.__args__)

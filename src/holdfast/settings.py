"""Settings of a host and its server, with their defaults and descriptions, and functions that load them.

A flag or argument overrides the environment variable ``HOLDFAST_<NAME>``, which overrides ``holdfast.toml``. An invalid
value raises a `ConfigurationError` that names the setting, the value and the source of the value. The table of defaults
in the docs is generated from `describe()`.
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

from holdfast import old_names
from holdfast.errors import ConfigurationError
from holdfast.setting_text import rule, type_name, written
from holdfast.store_url import shown_store

__all__ = [
    "CONFIG_FILE",
    "DATA_FOLDER",
    "DEFAULT_STORE",
    "OTHER_VARIABLES",
    "SettingInfo",
    "Settings",
    "config_file",
    "data_folder",
    "default_store",
    "describe",
    "load_settings",
    "names_store",
    "server_url",
    "stored_limit",
]

CONFIG_FILE = "holdfast.toml"
DATA_FOLDER = ".holdfast"
"""Name of the folder beside the settings file that holds the store, its side files and the workspaces."""
_STORE_NAME = "holdfast.db"
DEFAULT_STORE = f"sqlite:///{DATA_FOLDER}/{_STORE_NAME}"
_PREFIX = "HOLDFAST_"
_SECRET = ("jwt_secret", "nats", "store", "store_direct")
"""Settings whose invalid values no error shows."""
_SECRET_LENGTH = 32
_STORED_BYTES = 10_000_000_000
OTHER_VARIABLES = frozenset(
    (
        "HOLDFAST_CHROMIUM",
        "HOLDFAST_CONFIG",
        "HOLDFAST_FAILPOINT",
        "HOLDFAST_KEY",
        "HOLDFAST_NEMESIS_CLOCK",
        "HOLDFAST_NEMESIS_DISK",
        "HOLDFAST_NEMESIS_LEVERS",
        "HOLDFAST_SCOPE",
        "HOLDFAST_SESSION",
        "HOLDFAST_STORM",
        "HOLDFAST_STORM_NAME",
        "HOLDFAST_STORM_STAMPS",
        "HOLDFAST_URL",
    )
)
"""Environment variables of Holdfast that are not settings. Any other ``HOLDFAST_*`` variable must name a setting."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a host and its server. Durations are in seconds; see each field's description for its meaning.

    Raises:
        ConfigurationError: if a value has the wrong type or is out of range.
    """

    # Address, store, agent
    host: Annotated[
        str,
        Meta(min_length=1, description="address to listen on; any address but loopback requires API keys"),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=0, le=65535, description="port to listen on; 0 picks a free one. Client commands connect to this port"),
    ] = 8420
    store: Annotated[
        str,
        Meta(
            min_length=1,
            description="where to store sessions: `sqlite:///<file>`, `postgresql://<user>:<password>@<host>/<name>` "
            "or `memory://`; the default path is relative to `holdfast.toml`",
        ),
    ] = DEFAULT_STORE
    store_direct: Annotated[
        str, Meta(description="PostgreSQL behind pgbouncer: URL that bypasses it, for signals; empty: the store's URL")
    ] = ""
    agent: Annotated[
        str, Meta(min_length=1, description="agent that `holdfast serve` runs, as `module:name`; default: the demo")
    ] = "holdfast.agents.demo:agent"
    sandbox: Annotated[
        Literal["auto", "linux", "bwrap", "podman", "docker", "none"],
        Meta(
            description="how programs of tools are confined; `auto`: the first of `linux` and `bwrap` that works here; "
            "`none`: not at all, programs have all rights of the server's user"
        ),
    ] = "auto"
    debuggers: Annotated[
        bool,
        Meta(description="allow debuggers, profilers and core dumps of the same user to read the server's memory"),
    ] = False
    worker_variables: Annotated[
        tuple[str, ...],
        Meta(
            description='environment variables to pass to `isolation="process"` processes, by name or pattern, '
            "in addition to the ones an interpreter needs"
        ),
    ] = ()
    lease_s: Annotated[
        float, Meta(ge=2, description="PostgreSQL: duration of a host's lease; other hosts take over its runs after it")
    ] = 10.0
    cluster_poll_s: Annotated[
        float, Meta(ge=0.05, description="PostgreSQL: interval at which a host looks for changes of other hosts")
    ] = 2.0
    nats: Annotated[
        str,
        Meta(
            description="PostgreSQL: NATS servers over which hosts notify each other and send events, such as "
            "`nats://<user>:<password>@<host>:4222` or `tls://…`, separated by commas; empty: over PostgreSQL"
        ),
    ] = ""
    workspace_pool: Annotated[
        str,
        Meta(
            max_length=100,
            pattern=r"^[A-Za-z0-9._-]*$",
            description="PostgreSQL: name for the hosts that share this host's folder of workspaces; sessions that use "
            "files stay with them. Empty: any host takes them",
        ),
    ] = ""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="lowest severity to log")] = (
        "info"
    )

    # Stopping
    grace_s: Annotated[float, Meta(ge=0, description="grace period for a run's cleanup after an interrupt")] = 5.0
    abandon_after_s: Annotated[
        float, Meta(ge=0, description="after the grace period, wait this long, then abandon and report what still runs")
    ] = 2.0
    drain_timeout_s: Annotated[float, Meta(ge=0, description="at shutdown, time for runs to finish")] = 30.0
    stop_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            description="an HTTP stop without `?wait=` waits this long for its receipt, then returns 202 and a stop id",
        ),
    ] = 15.0

    # Deadlines of work
    tool_timeout_s: Annotated[float, Meta(gt=0, description="stop a call that runs longer than this")] = 60.0
    step_timeout_s: Annotated[float, Meta(gt=0, description="interrupt a run whose step takes longer than this")] = (
        120.0
    )
    run_timeout_s: Annotated[float, Meta(gt=0, description="interrupt a run that takes longer than this")] = 1800.0
    wait_limit_s: Annotated[float, Meta(gt=0, description="largest `?wait=` allowed for an HTTP request")] = 300.0
    question_ttl_s: Annotated[
        float, Meta(gt=0, description="an unanswered question to a person expires after this time")
    ] = 7 * 86400.0

    # Mailbox and policies
    mailbox_limit: Annotated[int, Meta(ge=1, description="maximum number of queued messages per session")] = 100
    mailbox_size: Annotated[
        int, Meta(ge=1024, description="maximum total size of a session's queued messages, in characters")
    ] = 8_000_000
    quiet_s: Annotated[
        float, Meta(ge=0, description="`collect`: a batch is due after this long without a new message")
    ] = 1.0
    max_wait_s: Annotated[
        float, Meta(ge=0, description="`collect`: a batch is due at the latest this long after its first message")
    ] = 10.0
    restart_limit: Annotated[
        int, Meta(ge=0, description="give up a run after this many crashes in a row without progress")
    ] = 3

    # Retention
    event_retention_s: Annotated[
        float, Meta(gt=0, description="delete events of ended runs after this time; transcripts are kept forever")
    ] = 30 * 86400.0
    event_archive: Annotated[
        str,
        Meta(
            description="folder to which events are written, as lines of JSON, before they are deleted after "
            "event_retention_s; empty: they are deleted without a copy"
        ),
    ] = ""
    tombstone_s: Annotated[
        float,
        Meta(
            ge=0,
            description="a deleted session's key returns 410 for this long; its contents are deleted at once",
        ),
    ] = 7 * 86400.0
    attachment_retention_s: Annotated[
        float, Meta(gt=0, description="delete an attachment that no session uses this long after its upload")
    ] = 86400.0
    prune_every_s: Annotated[
        float, Meta(gt=0, description="interval at which expired data is deleted from the store")
    ] = 3600.0
    idempotency_s: Annotated[float, Meta(gt=0, description="keep idempotency keys for at least this long")] = (
        7 * 86400.0
    )
    evict_after_s: Annotated[
        float, Meta(gt=0, description="unload an idle session from memory after this time; it stays in the store")
    ] = 60.0

    # Limits
    max_runs: Annotated[int, Meta(ge=1, description="maximum concurrent runs in this host")] = 1000
    principal_runs: Annotated[
        int, Meta(ge=1, description="maximum concurrent runs per principal; divided among the hosts of a database")
    ] = 100
    principal_threads: Annotated[int, Meta(ge=1, description="maximum concurrent threads per principal")] = 64
    principal_abandoned: Annotated[
        int, Meta(ge=1, description="a principal with this many abandoned threads gets no new threads")
    ] = 16
    principal_background: Annotated[
        int, Meta(ge=1, description="maximum background work items per principal, across its runs")
    ] = 100
    principal_sessions: Annotated[int, Meta(ge=1, description="maximum sessions per principal")] = 100_000
    principal_schedules: Annotated[int, Meta(ge=1, description="maximum schedules per principal")] = 1000
    principal_rate_per_s: Annotated[
        float,
        Meta(ge=0, description="HTTP requests per second per principal, with a burst of twice that; 0: no limit"),
    ] = 1000.0
    principal_streams: Annotated[int, Meta(ge=1, description="maximum open event streams per principal")] = 10_000
    memory_limit_bytes: Annotated[
        int,
        Meta(ge=1_000_000, description="maximum memory for large requests and responses in progress, in bytes"),
    ] = 128_000_000
    principal_memory_bytes: Annotated[
        int, Meta(ge=1_000_000, description="maximum share of memory_limit_bytes per principal, in bytes")
    ] = 32_000_000
    body_limit_bytes: Annotated[int, Meta(ge=1024, description="maximum size of a request body, in bytes")] = 1_000_000
    import_limit_bytes: Annotated[
        int, Meta(ge=1024, description="maximum size of a session import over HTTP, in bytes")
    ] = 50_000_000
    attachment_limit_bytes: Annotated[int, Meta(ge=1, description="maximum size of an attachment, in bytes")] = (
        20_000_000
    )
    principal_attachments_bytes: Annotated[
        int, Meta(ge=1, description="maximum total size of a principal's attachments, in bytes")
    ] = 1_000_000_000
    principal_stored_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="maximum stored data per principal, in bytes: messages, events, transcripts and "
            "attachments; 0: 10 GB, or half of memory_limit_bytes for a store in memory",
        ),
    ] = 0
    principal_fires_per_s: Annotated[
        float,
        Meta(ge=0, description="schedule firings per second per principal, the rest are delayed; 0: no limit"),
    ] = 100.0

    # Programs of tools
    principal_program_connections: Annotated[
        int, Meta(ge=1, description="maximum open network connections of a principal's walled programs together")
    ] = 512
    principal_program_traffic_bytes: Annotated[
        int,
        Meta(ge=1, description="maximum bytes that a principal's walled programs send and receive in an hour"),
    ] = 8_000_000_000
    principal_program_memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="maximum memory of a principal's programs together, in bytes; 0: half of this machine's memory",
        ),
    ] = 0
    principal_program_processes: Annotated[
        int, Meta(ge=1, description="maximum processes and threads of a principal's programs together")
    ] = 1024
    principal_program_files: Annotated[
        int, Meta(ge=1, description="maximum open files of a principal's programs together")
    ] = 16_384
    principal_disk_bytes: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum size of a principal's workspaces, in bytes; above it, files can only be deleted",
        ),
    ] = 10_000_000_000
    principal_inodes: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum files and folders in a principal's workspaces; above it, files can only be deleted",
        ),
    ] = 1_000_000
    disk_reserve_bytes: Annotated[
        int,
        Meta(ge=0, description="free space that programs and tools must leave on the disk of the workspaces, in bytes"),
    ] = 500_000_000
    loop_block_s: Annotated[
        float,
        Meta(ge=0, description="report an event loop that is blocked for this long, with its stack; 0: never"),
    ] = 1.0

    # HTTP
    keepalive_s: Annotated[
        float, Meta(gt=0, description="send a comment line on an idle event stream at this interval")
    ] = 15.0
    stream_stall_s: Annotated[
        float, Meta(gt=0, description="close a stream after the client has not read for this long")
    ] = 60.0
    head_timeout_s: Annotated[
        float,
        Meta(gt=0, description="time for a request head to arrive, for the first request counted from the connection"),
    ] = 10.0
    idle_connection_timeout_s: Annotated[
        float, Meta(gt=0, description="close a connection after this long without a request")
    ] = 75.0
    max_connections: Annotated[
        int,
        Meta(
            ge=1, description="maximum open connections; a quarter of the file descriptors, at most 4,096, stays free"
        ),
    ] = 20_000
    principal_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum open connections per principal, or of all clients without a key; at most half of all",
        ),
    ] = 10_000
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="time for a request body to arrive, for each megabyte that it may have")
    ] = 30.0
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(description="`Host` names to accept in addition to loopback and the listen address"),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(description="origins of web pages that may call the API, such as `https://chat.example.org`"),
    ] = ()
    public_agents: Annotated[
        tuple[str, ...],
        Meta(
            description="agents that keys and tokens without their own list may use, `*` for all; "
            "empty: the default agent only. Admin keys may use all"
        ),
    ] = ()

    # Signed tokens of an identity provider, in addition to API keys
    jwt_secret: Annotated[
        str, Meta(description="secret of bearer tokens (JWT) signed with HS256, at least 32 characters")
    ] = ""
    jwt_public_key: Annotated[
        str, Meta(description="public key of bearer tokens (JWT) signed with RS256: PEM text or a PEM file")
    ] = ""
    jwt_issuer: Annotated[str, Meta(description="required `iss` of a token; empty: any")] = ""
    jwt_audience: Annotated[
        str, Meta(description="value that a token's `aud` must contain; empty: refuse tokens with an `aud`")
    ] = ""

    def __post_init__(self) -> None:
        """Check the type and range of every value."""
        for name in self.__struct_fields__:
            _convert(name, getattr(self, name), source="an argument", strict=True)

    def __repr__(self) -> str:
        values = msgspec.structs.asdict(self)
        values |= {"store": shown_store(self.store), "store_direct": shown_store(self.store_direct)}
        values |= {name: "***" for name in ("jwt_secret", "nats") if values[name]}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in values.items())})"


_TYPES: Mapping[str, Any] = {field.name: field.type for field in msgspec.structs.fields(Settings)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingInfo:
    """One row of the settings table.

    Parameters:
        name: name of the setting in ``holdfast.toml`` and as an argument of `Settings`.
        variable: name of the environment variable.
        type: type in plain English, such as "whole number".
        default: default value, formatted as in ``holdfast.toml``.
        doc: description of the setting.
    """

    name: str
    variable: str
    type: str
    default: str
    doc: str


def describe() -> tuple[SettingInfo, ...]:
    """Return the descriptions of all settings in declaration order, for the docs and ``holdfast serve --help``."""
    rows = []
    for field in msgspec.structs.fields(Settings):
        base, meta = field.type.__origin__, field.type.__metadata__[0]
        rows.append(
            SettingInfo(
                name=field.name,
                variable=_PREFIX + field.name.upper(),
                type=type_name(base),
                default=written(field.default),
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
    """Load the settings from `flags`, the environment and the settings file, in this order of precedence.

    Parameters:
        flags: values from the command line, by name of the setting; None means that the flag was not given.
        environ: environment variables; None uses those of this process. The variable ``HOLDFAST_CONFIG``, if set, is
            the path of the settings file.
        folder: folder that contains ``holdfast.toml``; ignored if ``HOLDFAST_CONFIG`` is set.

    Raises:
        ConfigurationError: if a setting is unknown, a value is invalid, or the settings file cannot be read.
    """
    environment = os.environ if environ is None else environ
    values = _read_values(flags or {}, environment, folder)
    values.setdefault("store", default_store(environ=environment, folder=folder))
    return Settings(**values)


def stored_limit(settings: Settings, *, in_memory: bool) -> int:
    """Return the maximum number of bytes that each principal may store.

    Parameters:
        settings: the host's settings.
        in_memory: whether the store is in memory; if so, the default limit is half of ``memory_limit_bytes``.
    """
    if settings.principal_stored_bytes:
        return settings.principal_stored_bytes
    return settings.memory_limit_bytes // 2 if in_memory else _STORED_BYTES


def server_url(settings: Settings, *, port: int | None = None) -> str:
    """Return the URL at which clients on this machine reach the server of `settings`; `port` replaces its port."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port or settings.port}"


def names_store(flags: Mapping[str, object]) -> bool:
    """Return whether `flags`, the environment or the settings file set ``store``.

    Raises the same errors as `load_settings`.
    """
    return "store" in _read_values(flags, os.environ, ".")


def config_file(environ: Mapping[str, str] | None = None, folder: str | os.PathLike[str] = ".") -> Path:
    """Return the path of the settings file, which need not exist."""
    named = (os.environ if environ is None else environ).get("HOLDFAST_CONFIG")
    return Path(named) if named else Path(folder) / CONFIG_FILE


def data_folder(environ: Mapping[str, str] | None = None, folder: str | os.PathLike[str] = ".") -> Path:
    """Return the path of the data folder beside the settings file. The folder need not exist."""
    return config_file(environ, folder).parent / DATA_FOLDER


def default_store(*, environ: Mapping[str, str] | None = None, folder: str | os.PathLike[str] = ".") -> str:
    """Return the URL of the default store.

    The default store is the file ``holdfast.db`` in the data folder. If that file does not exist, but an older version
    of Holdfast created a ``holdfast.db`` beside the settings file, that older file is the default store.
    """
    path = data_folder(environ, folder) / _STORE_NAME
    old = path.parent.parent / _STORE_NAME
    return f"sqlite:///{old if old.exists() and not path.exists() else path}"


def _read_values(
    flags: Mapping[str, object], environment: Mapping[str, str], folder: str | os.PathLike[str]
) -> dict[str, Any]:
    """Return the settings that are set explicitly, by name."""
    values: dict[str, Any] = {}
    path = config_file(environment, folder)
    for name, value in _read_file(path, required="HOLDFAST_CONFIG" in environment).items():
        if name not in _TYPES:
            raise _unknown(name, source=str(path))
        values[name] = _convert(name, value, source=str(path), strict=True)
    for variable, text in environment.items():
        name = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if name not in _TYPES:
            raise _unknown_variable(variable)
        values[name] = _from_text(name, text, source=variable)
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
                f"no such file: {path} (named by HOLDFAST_CONFIG)", hint="correct the path or unset HOLDFAST_CONFIG"
            ) from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} is not readable: {error}", hint="check the file's owner, mode and encoding"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}", hint="fix that line") from error


def _from_text(name: str, text: str, *, source: str) -> Any:
    if getattr(_TYPES[name].__origin__, "__origin__", None) is tuple:
        return _convert(name, [part.strip() for part in text.split(",") if part.strip()], source=source, strict=True)
    return _convert(name, text.strip(), source=source, strict=False)


def _convert(name: str, value: object, *, source: str, strict: bool) -> Any:
    try:
        converted = msgspec.convert(value, _TYPES[name], strict=strict)
    except msgspec.ValidationError:
        pass
    else:
        if name == "jwt_secret" and 0 < len(converted) < _SECRET_LENGTH:
            raise ConfigurationError(
                f"setting jwt_secret (from {source}) is too short: {len(converted)} characters",
                hint=f"use {_SECRET_LENGTH} or more random characters",
            )
        if not isinstance(converted, float) or math.isfinite(converted):
            return converted
    shown = "***" if name in _SECRET else repr(value)
    raise ConfigurationError(
        f"invalid setting {name}={shown} (from {source}): {rule(_TYPES[name], value)}",
        hint=f"{name}: {_TYPES[name].__metadata__[0].description}; the default is {_default(name)}",
    )


def _unknown(name: str, *, source: str) -> ConfigurationError:
    message = f"unknown setting {name!r} (from {source})"
    if name in old_names.SETTINGS:
        return ConfigurationError(message, hint=f"it was renamed; use {old_names.SETTINGS[name]!r}")
    near = difflib.get_close_matches(name, _TYPES, n=1)
    return ConfigurationError(message, hint=f"did you mean {near[0]!r}?" if near else "see the settings reference")


def _unknown_variable(variable: str) -> ConfigurationError:
    message = f"unknown environment variable {variable}"
    renamed = old_names.SETTINGS.get(variable.removeprefix(_PREFIX).lower())
    if renamed is not None:
        return ConfigurationError(message, hint=f"it was renamed; use {_PREFIX}{renamed.upper()}")
    known = [*(name.upper() for name in _TYPES), *(name.removeprefix(_PREFIX) for name in OTHER_VARIABLES)]
    near = difflib.get_close_matches(variable.removeprefix(_PREFIX), known, n=1)
    hint = f"unset it, or did you mean {_PREFIX}{near[0]}?" if near else "unset it, or see the settings reference"
    return ConfigurationError(message, hint=hint)


def _default(name: str) -> str:
    return next(written(field.default) for field in msgspec.structs.fields(Settings) if field.name == name)

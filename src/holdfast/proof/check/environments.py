"""Frameworks for which ``holdfast check`` has adapters, and their environments, which are created on demand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from holdfast.errors import ConfigurationError
from holdfast.proof.check.subject import SubjectTarget

__all__ = ["FRAMEWORKS", "Framework", "cache_folder", "target_of"]

_ADAPTERS = Path(__file__).with_name("adapters")
_INSTALL_S = 900.0


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """A framework for which this package has an adapter.

    Parameters:
        title: the framework's name in the docs.
        adapter: the adapter's file and class, as ``file.py:Class``.
        packages: distributions to install, with versions; if empty, the adapter runs in Holdfast's own environment.
    """

    title: str
    adapter: str
    packages: tuple[str, ...] = ()


FRAMEWORKS: Mapping[str, Framework] = {
    "holdfast": Framework(title="Holdfast", adapter="holdfast_host.py:HoldfastHost"),
    "langgraph": Framework(
        title="LangGraph",
        adapter="langgraph_graph.py:LangGraph",
        packages=("langgraph==1.2.22", "langgraph-checkpoint-sqlite==3.1.2", "langchain-openai==1.7.3"),
    ),
    "pydantic-ai": Framework(
        title="Pydantic AI",
        adapter="pydantic_agent.py:PydanticAI",
        packages=("pydantic-ai-slim[openai]==2.68.0",),
    ),
    "openai-agents": Framework(
        title="OpenAI Agents",
        adapter="openai_agents.py:OpenAIAgents",
        packages=("openai-agents==0.24.0",),
    ),
    "google-adk": Framework(
        title="Google ADK",
        adapter="google_adk.py:GoogleADK",
        packages=(
            "google-adk==2.13.0",
            "litellm==1.106.2",
            "mcp==2.3.0",
            "sqlalchemy[asyncio]==2.1.9",
            "aiosqlite==0.22.1",
        ),
    ),
}
"""The frameworks, by their names on the command line."""


def cache_folder() -> Path:
    """Return the folder for environments: ``holdfast/check`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast" / "check"


def target_of(name: str, *, say: Callable[[str], None]) -> SubjectTarget:
    """Return the adapter that `name` selects, and the Python interpreter that runs it.

    This function may block for minutes if it has to create the framework's environment.

    Parameters:
        name: name of a framework in `FRAMEWORKS`, or location of an adapter class as ``module:Class`` or
            ``file.py:Class``, which runs in Holdfast's own environment.
        say: called with a message before each slow step.

    Raises:
        ConfigurationError: if the adapter is unknown, or its environment cannot be created.
    """
    framework = FRAMEWORKS.get(name)
    if framework is None:
        where, _, which = name.rpartition(":")
        if not (where and which) or (where.endswith(".py") and not Path(where).is_file()):
            raise ConfigurationError(
                f"unknown adapter {name!r}",
                hint=f"choose one of {', '.join(FRAMEWORKS)}, or your own as module:Class or file.py:Class",
            )
        return SubjectTarget(name=name, adapter=name, python=sys.executable)
    adapter = str(_ADAPTERS / framework.adapter)
    python = str(_environment(name, framework, say)) if framework.packages else sys.executable
    return SubjectTarget(name=name, adapter=adapter, python=python)


def _environment(name: str, framework: Framework, say: Callable[[str], None]) -> Path:
    """Return the interpreter of the framework's environment; create the environment if it is missing."""
    wanted = sha256("\n".join((sys.version, *framework.packages)).encode()).hexdigest()[:12]
    folder = cache_folder() / f"{name}-{wanted}"
    python = folder / "bin" / "python"
    whole = folder / "whole"
    if whole.exists():
        return python
    say(f"making an environment for {framework.title} in {folder}: {', '.join(framework.packages)}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, with_pip=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *framework.packages],
            check=True,
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
        )
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr or error.stdout or "no output").strip().splitlines()
        raise _not_made(framework, lines[-1]) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_made(framework, str(error)) from None
    whole.touch()
    return python


def _not_made(framework: Framework, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"could not make an environment for {framework.title}: {why}",
        hint="check that pip can reach a package index",
    )

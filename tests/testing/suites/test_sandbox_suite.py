"""The suite of walls passes for each backend that this machine and this user can use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from holdfast.testing import SANDBOX_CHECKS, run_sandbox_check
from holdfast.testing.suites.sandbox import SandboxCheck
from holdfast.tools.sandbox.backends.bwrap import BubblewrapBackend
from holdfast.tools.sandbox.backends.container import PodmanBackend
from holdfast.tools.sandbox.backends.linux import LinuxBackend
from holdfast.tools.sandbox.port import SandboxBackend
from tests.tools.sandbox.ordinary_user import run_as_ordinary_user

SUBJECTS: dict[str, Callable[[], SandboxBackend]] = {
    "namespaces and landlock": partial(LinuxBackend, ("namespaces", "landlock")),
    "namespaces": partial(LinuxBackend, ("namespaces",)),
    "landlock": partial(LinuxBackend, ("landlock",)),
    "bwrap": BubblewrapBackend,
    "podman": PodmanBackend,
}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Callable[[], SandboxBackend]:
    backend = SUBJECTS[request.param]()
    reason = backend.probe()
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return lambda: backend


@pytest.mark.parametrize("check", SANDBOX_CHECKS, ids=lambda check: check.__name__)
def test_backend_conforms(check: SandboxCheck, subject: Callable[[], SandboxBackend]) -> None:
    run_sandbox_check(check, subject)


def test_bubblewrap_conforms_for_an_ordinary_user() -> None:
    run_as_ordinary_user(__file__, "-k", "bwrap")

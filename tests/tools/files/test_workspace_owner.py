"""A workspace with an owner: the root is for its sessions, and everyone else works elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.tools import Files, Workspace
from tests.tools.files.test_quotas import Call, names, on_host


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has the settings file, and so the data folder."""
    (tmp_path / "holdfast.toml").touch()
    monkeypatch.setenv("HOLDFAST_CONFIG", str(tmp_path / "holdfast.toml"))
    return tmp_path


def test_only_the_owner_works_in_the_root(home: Path) -> None:
    workspace = Workspace(home / "work", owner="alice")

    async def body(call: Call) -> None:
        (home / "work" / "plan").write_text("the plan")
        assert "the plan" in await call("alice", "read_file", path="plan")
        assert "now has" in await call("alice", "write_file", path="of-alice", content="a")
        assert "ToolFailed" in await call("bob", "read_file", path="plan")
        assert "ToolFailed" in await call("bob", "read_file", path=str(home / "work" / "plan"))
        assert "now has" in await call("bob", "write_file", path="of-bob", content="b")
        assert "ToolFailed" in await call("carol", "read_file", path="of-bob")
        assert names(home / "work") == ["of-alice", "plan"]
        assert "of-bob" in names(home / ".holdfast" / "workspaces")

    on_host([Files(workspace)], body)


def test_each_principals_quota_counts_its_own_files(home: Path) -> None:
    workspace = Workspace(home / "work", owner="alice")

    async def body(call: Call) -> None:
        assert "now has" in await call("alice", "write_file", path="a", content="x" * (3 << 20))
        assert "now has" in await call("bob", "write_file", path="b", content="x" * (3 << 20))
        refused = await call("alice", "write_file", path="c", content="x" * (2 << 20))
        assert "the workspace of user alice holds 3" in refused

    on_host([Files(workspace)], body)


def test_without_an_owner_the_root_is_shared(home: Path) -> None:
    workspace = Workspace(home / "work")

    async def body(call: Call) -> None:
        assert "now has" in await call("alice", "write_file", path="a", content="of alice")
        assert "of alice" in await call("bob", "read_file", path="a")

    on_host([Files(workspace)], body)

"""A command ends although an agent ignores its cancellation for ever, and says what it left."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from holdfast.cli.exit_codes import Exit
from tests.cli.processes import HOLDFAST, LIMIT_S, clean_environment, served

_STUBBORN = """
import asyncio


async def agent(run):
    yield "begun\\n"
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
"""


def test_run_exits_after_its_receipt_names_a_task_that_never_ends(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(_STUBBORN)
    with subprocess.Popen(
        [*HOLDFAST, "run", "stubborn.py", "x"],
        cwd=tmp_path,
        env=clean_environment(HOLDFAST_GRACE_S="0.2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == Exit.INTERRUPTED, said
    assert "ms: nothing ended\nabandoned: task agent" in said
    assert "destroyed" not in said


def test_serve_exits_after_its_report_although_a_task_never_ends(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(_STUBBORN)
    with served(tmp_path, "stubborn.py", HOLDFAST_GRACE_S="0.2") as server:
        assert server.run("send", "x").returncode == 0
        server.end(signal.SIGINT)
    assert [line["event"] for line in server.lines] == ["stopping", "stopped"]
    assert "destroyed" not in server.said
    assert "Traceback" not in server.said

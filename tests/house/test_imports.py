"""What importing costs and pulls in, measured in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def modules_after(statement: str, *flags: str) -> set[str]:
    first, last = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r})",
        "import json; print(json.dumps(list(sys.modules)))",
    )
    program = f"{first}; {statement}; {last}"
    result = subprocess.run([sys.executable, *flags, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def test_the_runtime_needs_nothing_but_the_standard_library() -> None:
    program = "import holdfast.runtime; [getattr(holdfast.runtime, name) for name in holdfast.runtime.__all__]"
    # -I -S: no site-packages, no environment variables.
    names = {name.partition(".")[0] for name in modules_after(program, "-I", "-S")}
    foreign = names - set(sys.stdlib_module_names) - {"holdfast", "__main__"}
    assert not {name for name in foreign if not name.startswith("_")}


def test_importing_the_runtime_pulls_in_no_other_layer() -> None:
    ours = {name for name in modules_after("import holdfast.runtime") if name.startswith("holdfast.")}
    layers = {name.split(".")[1] for name in ours}
    assert layers <= {"runtime", "protocol", "errors", "clock", "lazy", "version"}
    assert not {name for name in ours if name.startswith("holdfast.protocol.")} - {"holdfast.protocol.stopping"}


def test_importing_holdfast_pulls_in_nothing_heavy() -> None:
    names = modules_after("import holdfast")
    assert not names & {"asyncio", "msgspec", "starlette", "uvicorn", "httpx2", "typer", "rich", "psutil", "sqlite3"}


def test_a_programs_first_import_pulls_in_no_server_and_no_command_line() -> None:
    names = modules_after("import holdfast; holdfast.Host, holdfast.Run, holdfast.agent")
    assert not names & {"starlette", "uvicorn", "httpx2", "typer", "rich"}


def test_importing_the_client_pulls_in_no_store_and_no_server() -> None:
    names = modules_after("import holdfast; holdfast.Client")
    assert not names & {"starlette", "uvicorn", "typer", "rich", "sqlite3", "holdfast.storage", "holdfast.host"}

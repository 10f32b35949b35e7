"""Runs the zoo behind one wall and judges it: `findings` is what tests and the docs' table read."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.system.escapes.escape import Escape, Limits, Scene
from tests.system.escapes.proxied import ALLOWED
from tests.system.escapes.proxies import FRIEND, befriended, careless_proxies, proxy_of
from tests.system.escapes.stage import PYTHON, Stage, staged
from tests.system.escapes.walls import Starter, Wall, started

__all__ = ["Finding", "findings"]

_HERE = Path(__file__).resolve().parent
_SHOWN = 600
_SOLOS_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of one escape behind one wall.

    Parameters:
        began: whether the program ran at all; one that did not proves nothing.
        through: whether it got through.
        output: the end of what it wrote, for people.
    """

    began: bool
    through: bool
    output: str


def findings(wall: Wall, escapes: Sequence[Escape]) -> dict[str, Finding]:
    """Run the escapes behind a wall and judge each, by name. Those that are not for it are left out.

    Raises:
        AssertionError: the network should be open, and leads nowhere: then it proves nothing that nothing got through.
    """
    tried = [escape for escape in escapes if escape.is_for(wall)]
    allowed = ALLOWED if wall.has_proxy else ()
    found: dict[str, Finding] = {}
    asked: list[str] = []
    with staged(wall.uid, [*tried, *allowed]) as stage, started(wall, stage) as starter, ExitStack() as more:
        neighbour = threading.Thread(target=_run_neighbour, args=(starter, stage))
        neighbour.start()
        stage.meet_neighbour()
        if wall.has_proxy:
            careless = not wall.has_network
            told = more.enter_context(careless_proxies(stage.start)) if careless else proxy_of(starter.process.pid)
            stage.meet_proxies(told, FRIEND, more.enter_context(befriended(stage.start, asked)))
        (stage.own / "driver.py").write_bytes((_HERE / "driver.py").read_bytes())
        together = [escape for escape in tried if not escape.alone]
        outputs = _run_together(starter, stage, [*allowed, *together])
        for escape in together:
            found[escape.name] = _judged(escape, stage, outputs.get(escape.name, outputs[""]), None)
        with ThreadPoolExecutor(_SOLOS_AT_ONCE) as threads:
            solos = [escape for escape in tried if escape.alone]
            for escape, finding in zip(
                solos, threads.map(lambda one: _run_alone(starter, stage, one), solos), strict=True
            ):
                found[escape.name] = finding
        (stage.neighbour / "stop").touch()
        neighbour.join()
    for one in allowed:
        assert any(one.name in path for path in asked), f"nothing gets through the proxy: {outputs[one.name]}"
    return found


def _run_neighbour(starter: Starter, stage: Stage) -> None:
    program = stage.neighbour / "neighbour.py"
    program.write_bytes((_HERE / "neighbour.py").read_bytes())
    argv = [PYTHON, "-I", "-S", str(program), stage.label, stage.secret, str(stage.neighbour)]
    starter.run(argv, workspace=stage.neighbour, limits=Limits())


def _judged(escape: Escape, stage: Stage, output: str, code: int | None) -> Finding:
    scene = Scene(stage=stage, name=escape.name, output=output, returncode=code)
    return Finding(began=output.startswith("began\n"), through=escape.judge(scene), output=output[-_SHOWN:])


def _run_together(starter: Starter, stage: Stage, escapes: Sequence[Escape]) -> Mapping[str, str]:
    """Run escapes in one start; their outputs by name, and under the empty name what came in place of them."""
    if not escapes:
        return {"": ""}
    argv = _written(stage, "together", escapes)
    code, output = starter.run(argv, workspace=stage.own, limits=Limits(processes=256))
    head, _, last = output.rstrip("\n").rpartition("\n")
    try:
        outputs: dict[str, str] = json.loads(last)
    except ValueError:
        return {"": f"the driver ended with {code}: {output}"}
    return {"": head} | outputs


def _run_alone(starter: Starter, stage: Stage, escape: Escape) -> Finding:
    argv = [*_written(stage, escape.name, [escape]), "solo"]
    code, output = starter.run(argv, workspace=stage.own, limits=escape.limits, session=escape.name)
    return _judged(escape, stage, output, code)


def _written(stage: Stage, name: str, escapes: Iterable[Escape]) -> list[str]:
    """Leave the programs in the workspace; the command that runs them."""
    driver, programs = stage.own / "driver.py", stage.own / f"{name}.json"
    ready = [
        {"name": one.name, "language": one.language, "program": one.program, "at": stage.places(one.name)}
        for one in escapes
    ]
    programs.write_text(json.dumps(ready))
    os.chown(programs, stage.uid, stage.uid)
    return [PYTHON, "-I", "-S", str(driver), str(programs)]

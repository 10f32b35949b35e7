"""A stand-in for docker's command, which records its arguments and behaves as the documentation of its options says.

It runs programs without any wall: it tests the command lines of the backend, not docker. ``run`` takes the variables
from the file of ``--env-file``, and starts the ``--entrypoint`` with the words after the image in the folder of
``--workdir``. Containers are files in the folder ``containers``; a file ``hangs`` makes all commands hang.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

WITH_VALUE = {
    *(
        "--name",
        "--label",
        "--pull",
        "--cap-drop",
        "--security-opt",
        "--env-file",
        "--env",
        "--network",
        "--log-driver",
    ),
    *("--oom-score-adj", "--user", "--tmpfs", "--shm-size", "--memory", "--pids-limit", "--mount", "--workdir"),
    *("--entrypoint", "--ulimit"),
}
FLAGS = {"--rm", "--interactive", "--read-only"}


def main(place: Path, words: list[str]) -> int:
    with (place / "calls").open("a") as file:
        file.write(json.dumps(words) + "\n")
    while (place / "hangs").exists():
        time.sleep(0.02)
    containers = place / "containers"
    match words:
        case ["version"] | ["import", "-", _]:
            sys.stdin.buffer.read()
            return 0
        case ["image", "inspect", _]:
            return 1
        case ["ps", "--all", "--filter", condition, "--format", _]:
            if condition.startswith("name="):
                name = condition.removeprefix("name=^").removesuffix("$")
                print("\n".join(path.name for path in containers.iterdir() if path.name == name))
            else:
                print("\n".join(path.name for path in containers.iterdir()))
            return 0
        case ["inspect", "--format", '{{index .Config.Labels "holdfast.host"}}', name]:
            print((containers / name).read_text())
            return 0
        case ["ps", "--all", "--quiet", "--filter", condition]:
            label = condition.removeprefix("label=holdfast.host=")
            print("\n".join(path.name for path in containers.iterdir() if path.read_text() == label))
            return 0
        case ["rm", "--force", *names]:
            if not (place / "keeps").exists():
                for name in names:
                    (containers / name).unlink(missing_ok=True)
            return 0
        case ["run", *rest]:
            return run(place, rest)
    print(f"unknown command: {words}", file=sys.stderr)
    return 1


def run(place: Path, words: list[str]) -> int:
    options: dict[str, list[str]] = {}
    while words[0].startswith("-"):
        word = words.pop(0)
        if word in WITH_VALUE:
            options.setdefault(word, []).append(words.pop(0))
        elif word not in FLAGS:
            print(f"unknown flag: {word}", file=sys.stderr)
            return 125
    environment = {"HOSTNAME": "stand-in"}
    for path in options.get("--env-file", ()):
        lines = Path(path).read_text().splitlines()
        environment |= dict(line.split("=", 1) for line in lines)
    for name in options.get("--env", ()):
        environment[name] = os.environ[name]
    profile = next(word for word in options["--security-opt"] if word.startswith("seccomp="))
    json.loads(Path(profile.removeprefix("seccomp=")).read_bytes())
    container = place / "containers" / options["--name"][0]
    container.write_text(options["--label"][0].removeprefix("holdfast.host="))
    os.chdir(options["--workdir"][0])
    argv = [options["--entrypoint"][0], *words[1:]]
    argv[2] = argv[2].replace(
        "kill -TERM -1", "kill -TERM $program"
    )  # the processes of this machine are not a container's
    pid = os.fork()
    if pid == 0:
        os.closerange(3, 64)
        os.execve(argv[0], argv, environment)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if (place / "keeps").exists():
        return code
    container.unlink(missing_ok=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main(Path(__file__).parent, sys.argv[1:]))

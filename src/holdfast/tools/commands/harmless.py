"""Commands that run without a person's approval, each with the rule for its arguments.

A command needs approval if it is not in the table, or if its arguments break the rule for the command.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from holdfast.tools.commands import argument_rules as rules
from holdfast.tools.commands.argument_rules import Rule, is_endless, is_inside, is_secret
from holdfast.tools.commands.shell_syntax import SimpleCommand, Word

__all__ = ["is_harmless"]

_UNKNOWN = Word(None)
_WRAPPER_LIMIT = 5
_INSTALLED = frozenset((".venv", "venv", ".bin", ".tox", ".nox"))
"""Folders of installed programs, as opposed to the project's own."""
_PROJECT_SCRIPTS = {"gradlew": "gradle", "mvnw": "mvn"}
_SYSTEM_FOLDERS = ("/bin", "/usr/bin", "/usr/local/bin")


def is_harmless(command: SimpleCommand, wrappers: int = 0) -> bool:
    """Return whether a command may run without a person's approval.

    Parameters:
        command: program and arguments.
        wrappers: number of wrapper programs (``env``, ``timeout``, …) already unwrapped.
    """
    name = None if command.name.has_glob else _program(command.name.text or "")
    if name is None or wrappers > _WRAPPER_LIMIT or any(map(is_secret, command.arguments)):
        return False
    if any(map(is_endless, command.arguments)) and not (name == "head" and _takes_few_bytes(command.arguments)):
        return False
    if name == "find":
        return _find(command.arguments, wrappers)
    if name in _RUNNERS and len(command.arguments) > 1 and command.arguments[0].text == "run":
        _, program, *rest = command.arguments
        return is_harmless(SimpleCommand(program, tuple(rest)), wrappers + 1)
    wrapper = _WRAPPERS.get(name)
    if wrapper is not None and command.arguments:
        inner = wrapper(command.arguments)
        return bool(inner) and is_harmless(SimpleCommand(inner[0], tuple(inner[1:])), wrappers + 1)
    rule = _RULES.get(name)
    return rule is not None and rule(command.arguments)


def _takes_few_bytes(words: Sequence[Word]) -> bool:
    return re.fullmatch(r"-c ?[0-9]{1,7} /dev/\w+", " ".join(word.text or "?" for word in words)) is not None


def _program(name: str) -> str | None:
    """Return the name under which to look up a program; None for a path that leads outside the current folder."""
    folder, slash, base = name.rpartition("/")
    if not slash or folder in _SYSTEM_FOLDERS:
        return base
    if not is_inside(Word(name)):
        return None
    if base in _PROJECT_SCRIPTS:
        return _PROJECT_SCRIPTS[base]
    installed = _INSTALLED.intersection(folder.split("/")) or base == "holdfast"
    return base if base in _RULES or base in _WRAPPERS or installed else "./"


# ── Programs that run the program named in their arguments ───────────────────────────────────────────────────────────

Unwrap = Callable[[Sequence[Word]], list[Word]]


def _behind(flags: str = r"(?!)", *, with_value: str = r"(?!)", operands: int = 0) -> Unwrap:
    """Return a function that returns the words after known options and `operands` operands of a wrapper program.

    If an option is unknown, the function returns an empty list.
    """
    known, valued = re.compile(flags), re.compile(with_value)

    def unwrap(words: Sequence[Word]) -> list[Word]:
        waiting = list(words)
        while waiting and (waiting[0].text or "").startswith("-"):
            option = waiting.pop(0).text or ""
            if valued.fullmatch(option):
                del waiting[:1]
            elif not known.fullmatch(option):
                return []
        return waiting[operands:]

    return unwrap


_PLAIN_VARIABLE = re.compile(
    r"(LANG|LC_\w+|TZ|CI|DEBUG|NODE_ENV|RUST_LOG|PORT|COLUMNS|NO_COLOR|FORCE_COLOR|PYTHONUNBUFFERED)="
)


def _env(words: Sequence[Word]) -> list[Word]:
    waiting = _behind(r"-i|--ignore-environment|-", with_value="-u")(words)
    while waiting and _PLAIN_VARIABLE.match(waiting[0].text or ""):
        del waiting[0]
    return [] if waiting and "=" in (waiting[0].text or "=") else waiting


def _xargs(words: Sequence[Word]) -> list[Word]:
    """Return the wrapped program with an additional argument that is unknown until the program runs."""
    inner = _behind(r"-0|-r|-t|-\w\d+|--null|--no-run-if-empty", with_value="-[nPLIdsa]")(words)
    return [*inner, _UNKNOWN] if inner else []


_RUNNERS = ("uv", "poetry", "pipenv", "pdm", "hatch")
"""Programs whose ``run`` subcommand runs a program in the project's environment."""
_WRAPPERS: dict[str, Unwrap] = {
    "env": _env,
    "time": _behind("-p|-v"),
    "timeout": _behind("--preserve-status|--foreground|-v", with_value="-[ks]", operands=1),
    "nice": _behind(r"-\d+|-n\d+", with_value="-n"),
    "ionice": _behind(r"-c\d|-n\d", with_value="-[cn]"),
    "stdbuf": _behind(r"-[ioe]\w+", with_value="-[ioe]"),
    "command": _behind("-[vVp]"),
    "builtin": _behind(),
    "exec": _behind(),
    "xargs": _xargs,
}


def _find(words: Sequence[Word], wrappers: int) -> bool:
    """Accept `find` if it neither deletes nor writes, and if each command it runs is harmless for any file name."""
    texts = [word.text for word in words]
    if None in texts or any(text in ("-delete", "-fprint", "-fprint0", "-fprintf", "-fls") for text in texts):
        return False
    index = 0
    while index < len(words):
        if texts[index] in ("-exec", "-execdir", "-ok", "-okdir"):
            end = next((at for at in range(index, len(words)) if texts[at] in (";", "+")), len(words))
            inner = [_UNKNOWN if "{}" in (word.text or "") else word for word in words[index + 1 : end]]
            if not inner or not is_harmless(SimpleCommand(inner[0], tuple(inner[1:])), wrappers + 1):
                return False
            index = end
        index += 1
    return True


# ── The table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_VERSION = "--version|-V|-v|version|--help|-h|help"
_PYTHONS = "python python3 pypy3 python3.10 python3.11 python3.12 python3.13 python3.14"
_PYTHON_MODULES = """
    pytest unittest mypy ruff black isort json.tool compileall py_compile doctest venv build coverage flake8
    pylint tokenize ast dis calendar pyright
"""

_READS = """
    ls dir cat head tail wc grep egrep fgrep zgrep cut tr paste column nl rev tac fold fmt expand unexpand diff cmp
    comm join stat du df md5sum sha1sum sha224sum sha256sum sha384sum sha512sum b2sum cksum sum base64 base32 od hexdump
    strings jq zcat bzcat xzcat cloc tokei colordiff more
"""
_TELLS = """
    pwd echo true false cal whoami id groups uname arch nproc uptime free pgrep tty which whereis type basename dirname
    realpath readlink expr bc factor dirs popd : exit return break continue shift seq sleep getconf locale lscpu lsblk
    numfmt set tput clear vmstat iostat lsmod
"""
_NAMES_VARIABLES = "test [ let read printf wait unset export local readonly declare typeset"
_CHECKS_AND_BUILDS = """
    ./ java mypy ruff black isort flake8 pylint pyright basedpyright coverage eslint prettier tsc
    jest vitest mocha stylelint rubocop rspec gofmt rustfmt shellcheck shfmt yamllint markdownlint hadolint
    gcc g++ cc c++ clang clang++ ld ar javac rustc ghc ctest clang-format clang-tidy sphinx-build
    lint-imports vulture bandit radon pydocstyle codespell phpunit
"""

_RULES: dict[str, Rule] = {
    **_each(_READS, rules.reads_public),
    **_each(_TELLS, rules.anything),
    **_each(_NAMES_VARIABLES, rules.has_no_subscript),
    **_each("cd pushd", rules.moves_into),
    "ps": rules.lists_processes,
    "xxd": rules.dumps_hex,
    "jobs": lambda words: not any((word.text or "-x") == "-x" for word in words),
    "date": rules.lacks("-s", "--set", "-f", "--file"),
    "tree": lambda words: rules.reads_public(words) and rules.lacks("-o", "-R")(words),
    "file": rules.lacks("-C", "--compile", "-m", "--magic-file"),
    "shuf": rules.sorts_inside,
    **_each("nm size objdump readelf", rules.lacks("--plugin")),
    **_each("pytest py.test", lambda words: rules.reaches_no_outside(words) and rules.lacks("--basetemp")(words)),
    **_each("ninja mkdocs hugo", lambda words: rules.makes(words) and rules.lacks("-t", "gh-deploy")(words)),
    **_each("hostname env", rules.nothing),
    "trap": lambda words: bool(words) and words[0].text in ("", "-"),  # sets no command
    "rg": rules.lacks("--pre", "--hostname-bin"),
    "ag": rules.lacks("--pager"),
    "fd": rules.lacks("-x", "-X", "--exec"),
    "less": rules.lacks(r"\+", "-o", "-O", "-k"),
    "man": rules.lacks("-P", "--pager", "-H", "--html"),
    "sort": rules.sorts_inside,
    "uniq": rules.writes_inside,
    "yq": rules.lacks("-i", "--inplace"),
    "printenv": rules.only(r"PATH|HOME|USER|SHELL|LANG|LC_\w+|PWD|TERM|TZ|VIRTUAL_ENV"),
    "journalctl": rules.lacks("--vacuum", "--rotate", "--flush"),
    # files below the current folder
    **_each("touch mkdir tee patch rmdir", rules.writes_inside),
    "split": lambda words: rules.writes_inside(words) and rules.lacks("--filter")(words),
    **_each("rm unlink", rules.removes_named_files),
    "mv": rules.moves_inside,
    "cp": rules.copies_inside,
    "ln": rules.links_inside,
    "chmod": rules.changes_modes_inside,
    "sed": rules.sed,
    **_each("awk gawk mawk nawk", rules.awk),
    "tar": rules.tar,
    **_each("gzip gunzip bzip2 bunzip2 xz unxz zstd unzstd unzip", rules.writes_inside),
    "zip": lambda words: rules.writes_inside(words) and rules.lacks("-m", "-T", "--unzip")(words),
    # the project's own programs and scripts, and tools that check and build them
    **_each(_CHECKS_AND_BUILDS, rules.reaches_no_outside),
    **_each("python python3 pypy3", rules.runs_script(r"-[uOBEsSIxWd]+|-W\w+", _PYTHON_MODULES.split())),
    **_each(
        "python3.10 python3.11 python3.12 python3.13 python3.14",
        rules.runs_script(r"-[uOBEsSIxWd]+", _PYTHON_MODULES.split()),
    ),
    **_each("node nodejs perl ruby php lua Rscript julia ts-node tsx bun", rules.runs_script("-w|--check|--test")),
    **_each("bash sh dash zsh ksh", rules.runs_script("-[eux]+|-n|--posix")),
    **_each("source .", lambda words: bool(words) and is_inside(words[0])),
    "make": rules.makes,
    "cmake": lambda words: rules.makes(words) and rules.lacks("--install", "-E", "-P")(words),
    "git": rules.uses_git,
    # packages, services and containers: read-only subcommands
    **_each("pip pip3", rules.subcommand(f"list|show|freeze|check|index|{_VERSION}", "-i$|--(extra-)?index-url|--log")),
    "uv": rules.subcommand(f"tree|{_VERSION}"),
    **_each(
        "npm pnpm yarn",
        rules.subcommand(
            f"test|t|run|run-script|ls|list|view|outdated|audit|why|{_VERSION}",
            "fix$|(pre|post)?publish|deploy|release|--prefix|--script-shell",
        ),
    ),
    "cargo": rules.subcommand(
        f"build|b|check|c|test|t|run|r|clippy|fmt|tree|doc|bench|metadata|{_VERSION}", "--config"
    ),
    "go": rules.subcommand(f"build|test|vet|fmt|list|env|doc|run|{_VERSION}", r"-w$|-exec|-toolexec|-u$|[\w.-]+\.\w+/"),
    "mvn": rules.subcommand(f"test|compile|package|verify|validate|{_VERSION}", "deploy|install|-s|-Dexec"),
    "gradle": rules.subcommand(f"test|build|check|tasks|assemble|{_VERSION}", "publish|-I|--init"),
    "dotnet": rules.subcommand(f"build|test|run|--info|{_VERSION}"),
    "bundle": rules.subcommand(f"list|show|check|{_VERSION}"),
    "gem": rules.subcommand(f"list|search|{_VERSION}"),
    **_each(
        "apt apt-get apt-cache dpkg brew",
        rules.subcommand(f"list|show|search|policy|-l|-L|-s|-S|{_VERSION}", "-o|-c|--option"),
    ),
    **_each("docker podman", rules.subcommand(f"ps|images|logs|info|stats|top|port|{_VERSION}")),
    "kubectl": rules.subcommand(f"get|describe|logs|top|explain|{_VERSION}", ".*secret"),
    "systemctl": rules.subcommand(f"status|is-active|is-enabled|list-units|{_VERSION}"),
    "curl": rules.fetches_url,
    "wget": rules.wget,
}

"""Decide which commands need a person's approval: all commands that are not known to be harmless.

A command needs no approval if every program in it only reads, builds or tests, and writes only below the current folder
(`holdfast.tools.commands.harmless`); the command's redirections may also write to files in ``/tmp``. Any other command
may destroy data, send data or change the machine. The decision is based only on the command's text. It protects against
a model's mistakes and is not a security boundary: scripts in the workspace run without inspection.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from holdfast.tools.commands.argument_rules import is_endless, is_inside, is_secret
from holdfast.tools.commands.harmless import is_harmless
from holdfast.tools.commands.shell_syntax import Redirect, SimpleCommand, Word, parse

__all__ = ["is_dangerous", "is_dangerous_call"]

_READABLE = 4_000
"""Maximum number of characters of a harmless command; a longer command always needs approval."""
_SHELLS = frozenset(("bash", "sh", "dash", "zsh", "ksh"))
_OUTPUTS = re.compile(r"/dev/(null|stdout|stderr|tty)|/tmp/[\w.-]+|\d+|-")
_CONTROLLING = re.compile(
    r"(LD|DYLD|GIT|GCC|PYTHON|PERL|RUBY|NODE|NPM|JAVA|MAVEN|CARGO|RUSTC|MAKE|SSH|BASH|ZSH)(_\w+|[A-Z]*)|"
    r"PATH|ENV|IFS|SHELL|SHELLOPTS|\w*PAGER|\w*EDITOR|VISUAL|BROWSER|PROMPT_COMMAND|PS[0-4]|HOME|CC|CXX|CFLAGS|LDFLAGS|"
    r"CDPATH|HISTFILE|POSIXLY_CORRECT|\w*_?(proxy|PROXY)|GOFLAGS|GOPATH|TAR_OPTIONS|LESS\w*|RIPGREP_CONFIG_PATH|CURL_HOME|WGETRC"
)
"""Variables that make harmless programs run other programs or read other settings."""
_ASSIGN = frozenset(
    ("read", "printf", "let", "wait", "unset", "export", "local", "readonly", "declare", "typeset", "mapfile")
)
"""Builtins whose arguments are variable names."""
_SUBSCRIPT = re.compile(
    r"'[^']*\w\[[^][']*(\$\(|`)|\"[^\"]*\w\[[^][\"]*\\(\$\(|`)|\$'[^']*\\(x24|0?44|u0024)|\b\w+='[^']*\$\("
)
"""Quoted array elements and variables that hold one; in arithmetic, the shell runs the commands in a subscript."""
_RETURN = re.compile(r"\s*(;|&&)\s*cd (\.\.|-)\s*$")
"""A `cd` back at the end of a command line, which is harmless because no command follows."""
_UNCONTROLLING = frozenset(
    ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "NODE_ENV", "CARGO_TERM_COLOR")
)


def is_dangerous(command: str | Sequence[str]) -> bool:
    """Return whether a person should review the command before it runs.

    Parameters:
        command: a shell command line, or a program and its arguments.
    """
    if not isinstance(command, str):
        if len(command) == 3 and command[0].rpartition("/")[2] in _SHELLS and re.fullmatch(r"-[a-z]*c", command[1]):
            return is_dangerous(command[2])
        words = [Word(word) for word in command]
        readable = sum(map(len, command)) <= _READABLE
        return not words or not readable or not is_harmless(SimpleCommand(words[0], tuple(words[1:])))
    if len(command) > _READABLE:
        return True
    line = parse(_RETURN.sub("", command))
    return (
        not line.is_understood
        or not all(map(_is_harmless, line.commands))
        or not all(map(_is_harmless_redirect, line.redirects))
        or any(map(_is_controlling, line.variables))
        or _SUBSCRIPT.search(command) is not None
    )


def _is_controlling(name: str) -> bool:
    return _CONTROLLING.fullmatch(name) is not None and name not in _UNCONTROLLING


def is_dangerous_call(arguments: dict[str, Any]) -> bool:
    """Return whether a call's ``command`` is dangerous; for a bare shell, whether the call's ``stdin`` is dangerous.

    This function can be used as an `Approval`.
    """
    command = arguments.get("command", "")
    given = command if isinstance(command, str) else [str(word) for word in command]
    if not given:
        return False
    if not _reads_commands(given):
        return is_dangerous(given)
    stdin = arguments.get("stdin")
    return isinstance(stdin, str) and is_dangerous(stdin)  # later input to a background shell is judged on its own


def _reads_commands(command: str | list[str]) -> bool:
    """Return whether the command is a bare shell, which reads its commands from standard input."""
    words = command.split() if isinstance(command, str) else command
    return (
        bool(words) and words[0].rpartition("/")[2] in _SHELLS and all(word in ("-s", "-e", "-x") for word in words[1:])
    )


def _is_harmless(command: SimpleCommand) -> bool:
    """Return whether a simple command is harmless; for ``sh -c``, judge the inner command line."""
    if command.name.text is not None and command.name.text.rpartition("/")[2] in _SHELLS:
        *options, line = command.arguments or (Word(None),)
        if options and re.fullmatch(r"-[a-z]*c", options[-1].text or "") and line.text is not None:
            plain = all(re.fullmatch(r"-[eux]+", option.text or "") for option in options[:-1])
            return plain and not is_dangerous(line.text)
    if command.name.text in _ASSIGN and any(_is_controlling(word.text or "") for word in command.arguments):
        return False
    return is_harmless(command)


def _is_harmless_redirect(redirect: Redirect) -> bool:
    target = redirect.target
    if is_secret(target) or is_endless(target):
        return False
    if ">" not in redirect.operator:
        return True
    return target.text is not None and (is_inside(target) or _OUTPUTS.fullmatch(target.text) is not None)

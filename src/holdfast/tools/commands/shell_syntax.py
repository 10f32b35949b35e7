"""Parse a shell command line into the simple commands, redirections and assignments that it contains.

The parser uses tree-sitter's grammar for Bash; it never raises and never runs for long. It finds commands everywhere:
in pipelines, loops, subshells, command and process substitutions, and here-documents.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

__all__ = ["CommandLine", "Redirect", "SimpleCommand", "Word", "parse"]

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_GLOB = re.compile(r"[*?\[{]")
_ASSIGNING = frozenset(("variable_assignment", "for_statement"))
_NOT_WORDS = frozenset(("file_redirect", "herestring_redirect", "heredoc_redirect", "variable_assignment", "comment"))


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command.

    Parameters:
        text: value of the word after quote removal; None if the value is known only at run time.
        has_glob: whether the word contains unquoted wildcards or braces, and may therefore expand to several words.
        known: for a word with an unknown value, its known parts, with ``?`` for each unknown part.
    """

    text: str | None
    has_glob: bool = False
    known: str = ""


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """A simple command: the name of a program and the program's arguments."""

    name: Word
    arguments: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirection to or from a file.

    Parameters:
        operator: redirection operator, such as ``>``, ``>>``, ``&>`` or ``<``.
        target: name of a file, or number of a descriptor.
    """

    operator: str
    target: Word


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The commands, redirections and assignments of a command line.

    Parameters:
        commands: all simple commands of the line, including nested commands.
        redirects: all redirections of the line.
        variables: names of variables that are assigned for the shell or for a single command.
        is_understood: whether the line is valid Bash without function definitions, which could redefine commands.
    """

    commands: tuple[SimpleCommand, ...]
    redirects: tuple[Redirect, ...]
    variables: frozenset[str]
    is_understood: bool


def parse(text: str) -> CommandLine:
    """Parse a command line. Never raises; safe to call from any thread."""
    root = _parser().parse(text.encode("utf-8", "replace")).root_node
    commands: list[SimpleCommand] = []
    redirects: list[Redirect] = []
    variables: set[str] = set()
    is_understood = not root.has_error
    for node in _walk(root):
        match node.type:
            case "command":
                commands.append(_read_command(node))
            case "declaration_command" | "unset_command":
                commands.append(_read_declaration(node))
            case "file_redirect":
                redirects.append(_read_redirect(node))
            case "variable_name" if node.parent is not None and node.parent.type in _ASSIGNING:
                variables.add(_text(node))
            case "function_definition":
                is_understood = False
    return CommandLine(tuple(commands), tuple(redirects), frozenset(variables), is_understood)


@functools.cache
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _walk(root: Node) -> Iterator[Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children)


def _read_command(node: Node) -> SimpleCommand:
    name = Word(None)
    arguments = []
    for child in node.named_children:
        if child.type == "command_name":
            name = _read_word(child.named_children[0]) if child.named_children else Word(None)
        elif child.type not in _NOT_WORDS:
            arguments.append(_read_word(child))
    return SimpleCommand(name, tuple(arguments))


def _read_declaration(node: Node) -> SimpleCommand:
    """Read a builtin such as ``export``, ``declare`` or ``unset``; `parse` collects the variables that it assigns."""
    keyword, *others = node.children
    words = [child for child in others if child.is_named and child.type not in _NOT_WORDS]
    return SimpleCommand(
        Word(_text(keyword)),
        tuple(Word(_text(word)) if word.type == "variable_name" else _read_word(word) for word in words),
    )


def _read_redirect(node: Node) -> Redirect:
    operator = next((_text(child) for child in node.children if not child.is_named), "")
    target = node.child_by_field_name("destination")
    return Redirect(operator, Word(None) if target is None else _read_word(target))


def _read_word(node: Node) -> Word:
    match node.type:
        case "word" | "number":
            text = _text(node)
            return Word(_ESCAPE.sub(r"\1", text), bool(_GLOB.search(_ESCAPE.sub("", text))))
        case "raw_string":
            return Word(_text(node)[1:-1])
        case "string":
            if all(child.type in ("string_content", '"') for child in node.children):
                return Word(_ESCAPE.sub(r"\1", _text(node)[1:-1]))
            parts = [_read_word(child) for child in node.children if child.type != '"']
            return Word(None, known="".join(map(_known, parts)))
        case "string_content":
            return Word(_ESCAPE.sub(r"\1", _text(node)))
        case "concatenation":
            parts = [_read_word(child) for child in node.children]
            texts = [part.text for part in parts]
            has_glob = any(part.has_glob for part in parts) or "brace_expression" in {c.type for c in node.children}
            if None in texts:
                return Word(None, has_glob, "".join(map(_known, parts)))
            return Word("".join(text or "" for text in texts), has_glob)
        case "{" | "}" | "[" | "]" | "," | ".." | "=" | ":":
            return Word(_text(node), has_glob=node.type in "{[")
        case "brace_expression" | "extglob_pattern" | "regex":
            return Word(_text(node), has_glob=True)
        case "arithmetic_expansion":  # always a number
            return Word("0")
        case "simple_expansion" | "expansion" if _text(node) in ("$HOME", "${HOME}"):
            return Word(None, known="~")
        case _:
            return Word(None)


def _known(part: Word) -> str:
    return (part.known or "?") if part.text is None else part.text


def _text(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")

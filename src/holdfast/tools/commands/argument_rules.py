"""Rules that decide whether a command's arguments keep the command harmless.

A rule is a function that takes a program's arguments and returns whether the program, with these arguments, only reads,
builds or tests, and writes only below the current folder. Most rules reject a word if its value is known only at run
time.
"""

from __future__ import annotations

import fnmatch
import os.path
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest

from holdfast.tools.commands.shell_syntax import Word

__all__ = [
    "Rule",
    "anything",
    "awk",
    "changes_modes_inside",
    "copies_inside",
    "dumps_hex",
    "fetches_url",
    "has_glob",
    "has_no_subscript",
    "is_endless",
    "is_inside",
    "is_secret",
    "lacks",
    "links_inside",
    "lists_processes",
    "makes",
    "moves_inside",
    "moves_into",
    "nothing",
    "only",
    "reaches_no_outside",
    "reads_public",
    "removes_named_files",
    "runs_script",
    "sed",
    "sorts_inside",
    "subcommand",
    "tar",
    "uses_git",
    "wget",
    "writes_inside",
]

Rule = Callable[[Sequence[Word]], bool]

_SECRET = re.compile(
    r"(^|[/=:@])\.?("
    r"ssh|aws|gnupg|kube|azure|docker/config|netrc|pgpass|git-credentials|npmrc|pypirc|env(\.[\w-]+)?|"
    r"(bash|zsh|python|psql|mysql)_history|holdfast(\.toml|\.db[\w-]*)?|config/gcloud|config/gh|"
    r"shadow|gshadow|sudoers|master\.passwd|credentials(\.\w+)?|secrets?(\.\w+)?"
    r")(/|$)|id_(rsa|ecdsa|ed25519|dsa)|\.(pem|key|p12|pfx|jks|keystore|kdbx)$|-token$|"
    r"/proc/[^/]+/(environ|mem|maps|root|fd|cwd)|/dev/(tcp|udp|mem|kmem|port|sd|nvme|vd)",
    re.IGNORECASE,
)
_PUBLIC_EXAMPLE = re.compile(r"\.env\.(example|sample|template|dist)$")


_SECRET_NAMES = (".env", ".ssh", ".aws", ".gnupg", ".kube", ".netrc", ".holdfast", "holdfast.toml", "holdfast.db")


def is_secret(word: Word) -> bool:
    """Return whether a word is a path to credentials, to a process's data, or to a network, memory or disk device."""
    text = word.known if word.text is None else word.text
    if word.has_glob and any(map(_may_be_secret, text.split("/"))):
        return True
    return bool(_SECRET.search(text)) and not _PUBLIC_EXAMPLE.search(text)


def _may_be_secret(part: str) -> bool:
    """Return whether a path part with wildcards targets secret names; a wildcard for all names does not count."""
    if not re.search(r"[*?\[{]", part) or not part.startswith((".", "h")):
        return False
    return "{" in part or any(fnmatch.fnmatchcase(name, part) for name in _SECRET_NAMES)


def is_endless(word: Word) -> bool:
    """Return whether a word names a device with endless output, which would fill the disk if copied to a file."""
    return re.fullmatch(r"/dev/(zero|u?random|full)", word.text or "") is not None


_HOMES = re.compile(r"~|/+(root|home|Users|var/lib)(/|$)|/+$|/+\*|\.\./\.\.(/|$)")


def reads_public(words: Sequence[Word]) -> bool:
    """Accept words other than the root folder and paths in home folders, in ``/var/lib``, or two or more levels up."""
    named = [word.known if word.text is None else word.text for word in words]
    return not any(_HOMES.match(text if text.endswith("/") else os.path.normpath(text)) for text in named if text)


def is_inside(word: Word) -> bool:
    """Return whether a word names a path below the current folder and outside of ``.git``."""
    if not word.text:
        return False
    parts = word.text.split("/")
    return not word.text.startswith(("/", "~", "-")) and ".." not in parts and ".git" not in parts


def has_glob(words: Sequence[Word]) -> bool:
    """Return whether any word contains a wildcard, which the shell may expand."""
    return any(word.has_glob for word in words)


def flags_of(words: Sequence[Word]) -> list[str]:
    """Return the options among the words."""
    return [word.text for word in words if word.text is not None and word.text.startswith("-") and word.text != "-"]


def operands_of(words: Sequence[Word]) -> list[Word]:
    """Return the words that are not options; all words after ``--`` are operands."""
    operands = []
    ended = False
    for word in words:
        if word.text == "--" and not ended:
            ended = True
        elif ended or word.text is None or not word.text.startswith("-") or word.text == "-":
            operands.append(word)
    return operands


def is_literal(words: Sequence[Word]) -> bool:
    """Return whether the values of all words are known before the command runs."""
    return all(word.text is not None for word in words)


# ── Any program ──────────────────────────────────────────────────────────────────────────────────────────────────────


def anything(_: Sequence[Word]) -> bool:
    """Accept all arguments."""
    return True


def nothing(words: Sequence[Word]) -> bool:
    """Accept only a command without arguments."""
    return not words


def lacks(*patterns: str) -> Rule:
    """Return a rule that accepts words with known values, unless a word starts with a match of a pattern."""
    forbidden = re.compile("|".join(patterns))
    return lambda words: is_literal(words) and not any(forbidden.match(word.text or "") for word in words)


def only(pattern: str) -> Rule:
    """Return a rule that accepts one or more words if each word matches the pattern completely."""
    allowed = re.compile(pattern)
    return lambda words: bool(words) and all(allowed.fullmatch(word.text or "") for word in words)


_OUTSIDE_OPTION = re.compile(
    r"--?(o|out|output|outfile|exec|config|rootdir|prefix|destdir|install)\w*(/|~|\.\.)|"
    r"-{0,2}\w[\w.-]*[=:](/|~|\.\./|\.\.$)|--pdbcls|--exec"
)


def reaches_no_outside(words: Sequence[Word]) -> bool:
    """Accept words that name no file outside the current folder."""
    return is_literal(words) and not any(
        _OUTSIDE_OPTION.match(word.text or "")
        or ((word.text or "").startswith(("/", "~", "../")) and word.text != "/dev/null")
        for word in words
    )


def subcommand(allowed: str, forbidden: str = r"(?!)") -> Rule:
    """Return a rule that accepts the subcommands that match `allowed`, and a command without arguments.

    No word may start with a match of `forbidden`, and no argument of the subcommand may name a file outside the current
    folder.
    """
    first, bad = re.compile(allowed), re.compile(forbidden)

    def rule(words: Sequence[Word]) -> bool:
        if not words:
            return True
        fits = is_literal(words) and first.fullmatch(words[0].text or "") is not None
        return fits and reaches_no_outside(words[1:]) and not any(bad.match(word.text or "") for word in words)

    return rule


def runs_script(flags: str, modules: Sequence[str] = ()) -> Rule:
    """Return a rule that lets an interpreter run a script below the current folder or one of `modules`.

    The rule also accepts a single option that prints the version or help.

    The rule does not accept an interpreter without a script, because the interpreter would execute its standard input.
    """
    allowed = re.compile(flags)

    def rule(words: Sequence[Word]) -> bool:
        if len(words) == 1 and words[0].text in ("-V", "--version", "-v", "--help", "-h"):
            return True
        for index, word in enumerate(words):
            text = word.text or ""
            if text == "-m" and modules:
                rest = words[index + 1 :]
                return bool(rest) and rest[0].text in modules and reaches_no_outside(rest[1:])
            if not text.startswith("-"):
                return is_inside(word) and not word.has_glob
            if not allowed.fullmatch(text):
                return False
        return False

    return rule


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def writes_inside(words: Sequence[Word]) -> bool:
    """Accept files below the current folder, also in options such as ``--output=FILE``."""
    named = [Word(flag.partition("=")[2]) for flag in flags_of(words) if "=" in flag]
    return is_literal(words) and all(is_inside(word) for word in (*operands_of(words), *named) if word.text)


def _names_target_folder(words: Sequence[Word]) -> bool:
    return any(flag.startswith(("-t", "--target")) for flag in flags_of(words))


def copies_inside(words: Sequence[Word]) -> bool:
    """Accept copying files to a target in or below the current folder."""
    operands = operands_of(words)
    literal = is_literal(words) and not _names_target_folder(words) and reads_public(operands)
    return literal and len(operands) >= 2 and (is_inside(operands[-1]) or operands[-1].text == ".")


def moves_inside(words: Sequence[Word]) -> bool:
    """Accept moving one file within the current folder."""
    operands = operands_of(words)
    return writes_inside(words) and not _names_target_folder(words) and len(operands) == 2 and not has_glob(operands)


def removes_named_files(words: Sequence[Word]) -> bool:
    """Accept removing files below the current folder, if no file name contains a wildcard."""
    plain = all(flag in ("-f", "-v", "-i", "--") for flag in flags_of(words))
    return plain and writes_inside(words) and not has_glob(words)


def links_inside(words: Sequence[Word]) -> bool:
    """Accept creating links below the current folder, but no option that replaces existing files."""
    return writes_inside(words) and not _names_target_folder(words) and "f" not in "".join(flags_of(words))


def changes_modes_inside(words: Sequence[Word]) -> bool:
    """Accept permission changes below the current folder, except to 777, set-uid, set-gid or sticky."""
    mode, *files = operands_of(words) or [Word(None)]
    plain = re.fullmatch(r"[ugoa]*[+-=][rwxX]+|[0-7]{3}", mode.text or "") is not None and mode.text != "777"
    return plain and not flags_of(words) and writes_inside(files)


def sorts_inside(words: Sequence[Word]) -> bool:
    """Accept an output file (``-o FILE``, in any spelling) below the current folder."""
    for word, following in zip_longest(words, words[1:], fillvalue=Word(None)):
        text = word.text or ""
        if text in ("-o", "--output") and not is_inside(following):
            return False
        attached = re.match(r"--output=(.*)|-o(.+)", text)
        if attached and text != "--output" and not is_inside(Word(attached[1] or attached[2])):
            return False
    return lacks("--compress-program", "-T", "--temporary")(words)


_SED_ADDRESS = r"(\d+|\$|/[^/]*/)"
_SED_SCRIPT = re.compile(
    rf"({_SED_ADDRESS}(,{_SED_ADDRESS})?)?!?"
    r"([pdq=]|s(?P<d>[/|#,:@])((?!(?P=d)).)*(?P=d)((?!(?P=d)).)*(?P=d)[gpiI0-9]*)"
)
_SED_FLAG = re.compile(r"-[nErsziu]+|-e|-i\.?\w*|--(expression|quiet|regexp-extended|in-place|silent)")


def sed(words: Sequence[Word]) -> bool:
    """Accept sed scripts that only substitute, print and delete, with ``-i`` only below the current folder."""
    operands = operands_of(words)
    scripts = [after for word, after in zip_longest(words, words[1:], fillvalue=Word(None)) if word.text == "-e"]
    files = [word for word in operands if word not in scripts]
    if not scripts:
        scripts, files = operands[:1], operands[1:]
    plain = all(_SED_SCRIPT.fullmatch(part.strip()) for one in scripts for part in (one.text or "e").split(";"))
    flags = flags_of(words)
    in_place = any(flag.startswith(("-i", "--in-place")) or re.fullmatch(r"-\w*i\w*", flag) for flag in flags)
    return plain and all(map(_SED_FLAG.fullmatch, flags)) and (not in_place or writes_inside(files))


_AWK_REACHES = re.compile(r"system|getline|>>|print[^;}]*>|(?<!\|)\|(?!\|)|@|-i\b|--include|-l\b|-f[/~]")


def awk(words: Sequence[Word]) -> bool:
    """Accept awk programs that start no command and write no file."""
    return is_literal(words) and not any(_AWK_REACHES.search(word.text or "") for word in words)


_TAR_FLAG = re.compile(r"-[ctxzjJvfrauk]+|--(exclude|strip-components)=\S+|-C")


def moves_into(words: Sequence[Word]) -> bool:
    """Accept one folder below the current folder."""
    return len(words) == 1 and (words[0].text == "." or is_inside(words[0])) and not words[0].has_glob


def has_no_subscript(words: Sequence[Word]) -> bool:
    """Accept words without an array subscript, because the shell runs commands inside a subscript."""
    return not any(re.search(r"\w\[", word.text or word.known) for word in words)


def dumps_hex(words: Sequence[Word]) -> bool:
    """Accept an output file (the second operand) below the current folder."""
    written = operands_of(words)[1:]
    return is_literal(words) and all(map(is_inside, written))


def lists_processes(words: Sequence[Word]) -> bool:
    """Accept options that do not show the environment variables of processes."""
    first = words[0].text or "" if words else ""
    return re.fullmatch(r"[a-z]*e[a-z]*", first) is None and lacks(r".*environ", "e+w*$")(words)


def tar(words: Sequence[Word]) -> bool:
    """Accept creating, reading and unpacking archives below the current folder."""
    if not words or not is_literal(words):
        return False
    mode = (words[0].text or "").removeprefix("-")
    plain = re.fullmatch(r"[ctxzjJvfrauk]+", mode) is not None and all(map(_TAR_FLAG.fullmatch, flags_of(words[1:])))
    return plain and all(is_inside(word) for word in operands_of(words[1:]))


_MAKE_REACHES = re.compile(r"(un)?install|publish|release|deploy\S*|push\S*|upload|SHELL=.*|--eval.*")


def makes(words: Sequence[Word]) -> bool:
    """Accept targets that do not install, publish or deploy, if no word names a file outside the current folder."""
    return reaches_no_outside(words) and not any(_MAKE_REACHES.fullmatch(word.text or "") for word in words)


# ── Git ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_GIT_READS = re.compile(
    "status|diff|log|show|blame|shortlog|describe|rev-parse|rev-list|ls-files|ls-tree|cat-file|grep|name-rev|merge-base|"
    "count-objects|fsck|whatchanged|cherry|range-diff|version|help|check-ignore|diff-tree|for-each-ref|show-ref"
)
_GIT_RUNS_OTHERS = re.compile(
    r"--config|--exec|--upload-pack|--receive-pack|-u$|--output|-O|--open-files|--ext-diff|--textconv|ext::|"
    r"--git-dir|--work-tree|--template|--separate-git-dir"
)
_MESSAGE = ("-m", "--message", "-am")

Texts = Sequence[str]


def _all(pattern: str) -> Callable[[Texts], bool]:
    allowed = re.compile(pattern)
    return lambda texts: all(allowed.fullmatch(text) for text in texts)


def _no(pattern: str) -> Callable[[Texts], bool]:
    forbidden = re.compile(pattern)
    return lambda texts: not any(forbidden.fullmatch(text) for text in texts)


def _starts(pattern: str) -> Callable[[Texts], bool]:
    """Return a check that passes if the list is empty or its first word matches `pattern`."""
    allowed = re.compile(pattern)
    return lambda texts: not texts or allowed.fullmatch(texts[0]) is not None


_REVISION = r"[\w@^~][\w./@{}^~-]*"
_HTTPS = r"https://[\w.:/~-]+"
_GIT_VERBS: dict[str, Callable[[Texts], bool]] = {
    "add": _no(r"-f|--force|-e|--edit|-i|--interactive|-p|--patch"),
    "commit": _no(r"--amend|--no-verify|-n|-F/.*|-t.*|--template.*|--author.*|--date.*"),
    "branch": _all(rf"-a|-r|-v|-vv|--list|--show-current|--all|--remotes|--merged|--no-merged|{_REVISION}"),
    "checkout": lambda texts: texts[:1] == ["-b"] and _all(_REVISION)(texts[1:]),
    "switch": _all(rf"-c|--create|{_REVISION}|-"),
    "fetch": _all(r"--all|--tags|--prune|-p|-q|-v|--depth=\d+|[\w-]+(/[\w.-]+)*"),
    "pull": _all(r"--ff-only|--rebase|-q|[\w-]+(/[\w.-]+)*"),
    "clone": _all(rf"--depth=\d+|--depth|\d+|-q|--single-branch|-b|--branch|{_HTTPS}|\w[\w.-]*"),
    "merge": _all(rf"--no-ff|--ff-only|--abort|--continue|-m|{_REVISION}"),
    "cherry-pick": _all(rf"--abort|--continue|-x|{_REVISION}"),
    "init": _all(r"-q|-b|[\w-]+"),
    "mv": _all(r"\w[\w./-]*"),
    "reset": _all(rf"--soft|--mixed|-q|--|{_REVISION}"),
    "restore": lambda texts: "--staged" in texts and _no("--worktree|-W")(texts),
    "stash": lambda texts: _starts("list|show|push|save")(texts) and _no("-a|--all")(texts),
    "tag": _all(rf"-l|--list|-n\d*|-a|{_REVISION}"),
    "remote": _starts("-v|--verbose|show|get-url"),
    "ls-remote": _all(rf"--heads|--tags|[\w-]+|{_HTTPS}"),
    "config": lambda texts: bool(texts) and _starts("--get|--list|-l|--get-all|get|list")(texts),
    "worktree": lambda texts: texts == ["list"],
    "submodule": lambda texts: texts in ([], ["status"]),
    "reflog": _starts("show"),
    "notes": _starts("list|show"),
}


def uses_git(words: Sequence[Word]) -> bool:
    """Accept commands that read, commit, fetch, merge or switch branches.

    Reject commands that discard changes, push, or run other programs.
    """
    if not is_literal(words):
        return False
    outside_message = [
        word for before, word in zip([Word(""), *words], words, strict=False) if before.text not in _MESSAGE
    ]
    if any(_GIT_RUNS_OTHERS.match(word.text or "") for word in outside_message):
        return False
    rest = list(words)
    while rest and (rest[0].text or "").startswith("-"):
        option = rest.pop(0).text
        if option == "-C":
            if not rest or not is_inside(rest.pop(0)):
                return False
        elif option not in ("--no-pager", "--version", "--help", "-P", "-p"):
            return False
    if not rest:
        return True
    verb = rest[0].text or ""
    rule = _GIT_VERBS.get(verb)
    texts = [word.text or "" for word in outside_message[len(words) - len(rest) + 1 :]]
    return _GIT_READS.fullmatch(verb) is not None or (rule is not None and rule(texts))


# ── The network ──────────────────────────────────────────────────────────────────────────────────────────────────────

_FETCH_FLAG = re.compile(
    r"-[sSLfIikvO#]+|--(silent|show-error|location|fail|head|include|compressed|verbose|remote-name|insecure)"
)
_FETCH_VALUE = re.compile(r"-[mAwH]|--(max-time|connect-timeout|retry|header)")
_URL = re.compile(r"https?://[\w.\[\]:-]+([/?]\S*)?|localhost(:\d+)?(/\S*)?|[\w-]+(\.[\w-]+)+(:\d+)?(/\S*)?")
_METADATA = re.compile(r"(https?://)?(169\.254\.|\[?fe80|\[?fd00|metadata\b|100\.100\.100\.200)", re.IGNORECASE)


def fetches_url(words: Sequence[Word]) -> bool:
    """Accept a plain GET by curl, to standard output or to a file below the current folder."""
    if not words or not is_literal(words):
        return False
    waiting = [word.text or "" for word in words]
    while waiting:
        text = waiting.pop(0)
        if text in ("-o", "--output"):
            if not waiting or not is_inside(Word(waiting.pop(0))):
                return False
        elif _FETCH_VALUE.fullmatch(text):
            if not waiting or waiting.pop(0).startswith("@"):
                return False
        elif text.startswith("-"):
            if not _FETCH_FLAG.fullmatch(text):
                return False
        elif not _URL.fullmatch(text) or _METADATA.match(text):
            return False
    return True


_OF_WGET = {"-O": "-o", "-qO": "-o", "-q": "-s", "-nv": "-s"}


def wget(words: Sequence[Word]) -> bool:
    """Accept wget's equivalents of the arguments that `fetches_url` accepts; ``-O -`` means standard output."""
    texts = [_OF_WGET.get(word.text or "", word.text) for word in words]
    return fetches_url([Word("page" if text == "-" else re.sub("^-qO-$", "-s", text or "")) for text in texts])

"""Escapes by how a harmful line is written: quoted, encoded, named otherwise, handed on, from standard input.

No text is judged: whatever a line looks like, its effects stay inside.
"""

from __future__ import annotations

from tests.system.escapes.escape import Escape, writes

__all__ = ["ESCAPES"]

_LINES = {
    "plainly": 'rm -rf "$OUTSIDE"',
    "with-quotes-inside": 'r\'\'m -r"f" "$OUTSIDE"',
    "with-a-backslash": '\\rm -rf "$OUTSIDE"',
    "by-its-path": '/bin/rm -rf "$OUTSIDE"',
    "by-command": 'command rm -rf "$OUTSIDE"',
    "by-env": 'env -i /bin/rm -rf "$OUTSIDE"',
    "by-env-with-a-split-string": 'env -S "rm -rf $OUTSIDE"',
    "by-an-alias": "alias tidy='rm -rf'\neval 'tidy \"$OUTSIDE\"'",
    "by-a-function": 'tidy() { rm -rf "$1"; }; tidy "$OUTSIDE"',
    "by-a-variable": 'R=rm; $R -rf "$OUTSIDE"',
    "without-spaces": 'IFS=,; line="rm,-rf,$OUTSIDE"; $line',
    "by-ifs": 'rm${IFS}-rf${IFS}"$OUTSIDE"',
    "by-eval": 'eval "$(printf "\\162\\155 -rf %s" "$OUTSIDE")"',
    "by-octal-digits": '$(printf "\\162\\155") -rf "$OUTSIDE"',
    "by-base64": "echo cm0gLXJmICIkT1VUU0lERSIK | base64 -d | sh",
    "by-hexadecimal-digits": "python3 -c \"import os; os.system(bytes.fromhex('726d202d726620').decode() + "
    "os.environ['OUTSIDE'])\"",
    "by-rot13": "echo 'ez -es \"$BHGFVQR\"' | tr 'A-Za-z' 'N-ZA-Mn-za-m' | sh",
    "by-reversing": "echo '\"EDISTUO$\" fr- mr' | rev | sh",
    "by-a-here-document": 'sh <<X\nrm -rf "$OUTSIDE"\nX',
    "by-a-quoted-here-document": "sh <<'X'\nrm -rf \"$OUTSIDE\"\nX",
    "by-standard-input": "echo 'rm -rf \"$OUTSIDE\"' | sh",
    "by-a-here-string": "bash -c 'sh <<< \"rm -rf $OUTSIDE\"'",
    "by-bash-quoting": 'bash -c $\'\\x72\\x6d -rf "$OUTSIDE"\'; bash -c "\\$\'\\\\x72\\\\x6d\' -rf \\"\\$OUTSIDE\\""',
    "by-brace-expansion": "bash -c '{rm,-rf,$OUTSIDE}'",
    "by-a-glob": '/b*n/r[m] -rf "$OUTSIDE"',
    "by-xargs": 'printf "%s" "$OUTSIDE" | xargs rm -rf',
    "by-find-delete": 'find "$OUTSIDE" -delete',
    "by-find-exec": 'find "$OUTSIDE" -type f -exec rm {} +',
    "by-awk": 'awk \'BEGIN { system("rm -rf " ENVIRON["OUTSIDE"]) }\'',
    "by-perl": 'perl -e \'system("rm", "-rf", $ENV{OUTSIDE})\'',
    "by-perl-unlink": "perl -e 'unlink($ENV{STORE})'",
    "by-python": "python3 -c \"import os, shutil; shutil.rmtree(os.environ['OUTSIDE'])\"",
    "by-sed": 'sed -i s/secret/forged/ "$STORE"',
    "by-sed-execute": "echo | sed '1e rm -rf \"$OUTSIDE\"'",
    "by-truncate": 'truncate -s 0 "$STORE"',
    "by-redirecting": ': > "$STORE"',
    "by-tar-checkpoints": "echo x > x; tar -cf x.tar --checkpoint=1 --checkpoint-action=exec='rm -rf \"$OUTSIDE\"' x",
    "by-git-config": "git init -q . && git -c core.pager='rm -rf "
    '"$OUTSIDE"; true\' -c alias.x=\'!rm -rf "$OUTSIDE"\' x',
    "by-a-script": "printf 'rm -rf \"$OUTSIDE\"' > tidy.sh; sh tidy.sh",
    "by-an-executable": "printf '#!/bin/sh\\nrm -rf \"$OUTSIDE\"' > tidy; chmod +x tidy; ./tidy",
    "by-a-program-named-otherwise": 'cp /bin/rm ./ls; ./ls -rf "$OUTSIDE"',
    "by-the-loader": '/lib64/ld-linux-x86-64.so.2 /bin/rm -rf "$OUTSIDE"',
    "by-make": "printf 'all:\\n\\t@rm -rf \"$$OUTSIDE\"\\n' > Makefile; make -s",
    "by-a-trap": "trap 'rm -rf \"$OUTSIDE\"' EXIT",
    "by-nohup": 'nohup rm -rf "$OUTSIDE"',
    "by-timeout": 'timeout 5 rm -rf "$OUTSIDE"',
    "by-nice": 'nice rm -rf "$OUTSIDE"',
    "by-setsid": 'setsid -w rm -rf "$OUTSIDE"',
    "by-script": "script -qc 'rm -rf \"$OUTSIDE\"' /dev/null",
    "in-the-background": 'rm -rf "$OUTSIDE" & wait',
    "in-a-pipeline": 'true | rm -rf "$OUTSIDE"',
    "by-rsync-of-nothing": 'mkdir nothing; rsync -a --delete nothing/ "$OUTSIDE/"',
    "by-install": 'echo forged > f; install f "$STORE"',
    "by-a-link-and-a-copy": 'ln -s "$STORE" l; echo forged > f; cp f l',
    "by-sqlite": "python3 -c \"import sqlite3; sqlite3.connect('$OUTSIDE/x').execute('create table t(x)')\"",
    "by-shred": 'shred -u "$STORE"',
    "by-mv": 'mv "$STORE" gone',
    "by-chmod": 'chmod -R a+rwX "$OUTSIDE"; chmod 777 "$TOKEN"',
}
_MAY_FAIL = {
    "by-make": "make is not installed",
    "by-rsync-of-nothing": "rsync is not installed",
    "by-the-loader": "the loader has another name",
    "by-script": "script is not installed",
    "by-perl": "perl is not installed",
    "by-perl-unlink": "perl is not installed",
}

ESCAPES = tuple(
    Escape(
        name=f"removes-{how}" if "rm" in line or "delete" in line else f"overwrites-{how}",
        subject="how a line is written",
        program=line,
        language="shell",
        judge=writes,
        may_fail=_MAY_FAIL.get(how, ""),
    )
    for how, line in _LINES.items()
)

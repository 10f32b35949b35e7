"""Faults of credentials and approvals: streams that outlive their key, calls nobody saw, keys that an agent reads."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        name="revoked keys keep their streams",
        of="H4",
        breaks="whoever had the key reads on, for as long as the stream is open",
        file="server/auth.py",
        old="        self.in_use.end_all_but(",
        new="        _ = (",
        tests=("tests/server/test_revocation.py",),
    ),
    Mutant(
        name="clock set back lengthens a token",
        of="H4",
        breaks="an expired token reads on after the clock was set back",
        file="server/credentials.py",
        old="(self._by_wall, self._clock.now()), (self._by_monotonic, self._clock.monotonic())):",
        new="(self._by_wall, self._clock.now()),):",
        tests=("tests/server/test_revocation.py",),
    ),
    Mutant(
        name="approval of another call",
        of="M1",
        breaks="what a person approved is not what is done",
        file="storage/suspending.py",
        old='given.decision == "approved" and given.call_hash and given.call_hash != hash_call(question)',
        new="given.question_id != question.question_id",
        tests=("tests/server/test_approvals.py",),
    ),
    Mutant(
        name="stored credentials approve",
        of="H8",
        breaks="an agent reads the local token and approves its own call",
        file="server/questions.py",
        old="        if native.approval_key_required:",
        new="        if body.approval_key:",
        tests=("tests/server/test_approvals.py",),
    ),
    Mutant(
        name="approval key made by an agent",
        of="H8",
        breaks="an agent with an admin key makes itself an approval key",
        file="server/native.py",
        old='        if body.role == "approver" and self.approval_key_required:',
        new='        if body.role == "approver" and body.approval_key:',
        tests=("tests/server/test_approvals.py",),
    ),
    Mutant(
        name="answers by the session's owner",
        of="F10",
        breaks="nobody can see who approved",
        file="server/questions.py",
        old="Answerer(caller.owner or caller.principal, ",
        new="Answerer(caller.principal, ",
        tests=("tests/server/test_approvals.py",),
    ),
    Mutant(
        name="a key names any agent by its session",
        of="M5",
        breaks="a user of one agent drives another one, through a session that has it",
        file="storage/verbs.py",
        old="    for name in sorted(hearing - allowed):",
        new="    for name in sorted(hearing - hearing):",
        tests=("tests/server/test_identity.py",),
    ),
)

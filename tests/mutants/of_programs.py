"""Faults of what is known of programs that foreign code starts: tags, kills, looks, strays, and the host's end."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

PROGRAMS = "tests/system/attacks/test_programs.py"
SHED = f"{PROGRAMS}::test_a_program_that_sheds_every_mark_is_gone_when_the_receipt_says_so"
STRAY = f"{PROGRAMS}::test_a_stray_of_nobody_is_told_to_the_operator_and_no_receipt_names_it"
UNDUMPABLE = "tests/system/attacks/test_undumpable.py"
CHASE = ("tests/runtime/adoption/test_chase.py",)
PASSES = ("tests/runtime/adoption/test_kill_passes.py",)

MUTANTS = (
    Mutant(
        name="programs of foreign code without a tag",
        of="F1 P3",
        breaks="the receipt reports gone although a program that left its parents is alive",
        file="runtime/adoption/tag_inheritance.py",
        old="            self.seal.put(0, self.outside if tag is None else tag)",
        new="            assert self.seal",
        tests=(SHED,),
    ),
    Mutant(
        name="a tag that can be taken off",
        of="F1 P3",
        breaks="a program that sets its limits survives although the receipt reports gone",
        file="runtime/processes/seal.py",
        old="        (_EQUAL, 0, 13, carrier),\n        (_RETURN, 0, 0, _PRETEND),",
        new="        (_EQUAL, 0, 13, carrier),\n        (_RETURN, 0, 0, _ALLOW),",
        tests=(SHED,),
    ),
    Mutant(
        name="a seal without a filter",
        of="F1 P3",
        breaks="every program can take off the tag that its kill goes by",
        file="runtime/processes/seal.py",
        old="    return int(_libc().syscall(number, _SECCOMP_SET_MODE_FILTER, _TSYNC_AND_SPEC_ALLOW, header)) == 0",
        new="    return bool(header)",
        tests=(SHED,),
    ),
    Mutant(
        name="nothing is looked for when the last program has ended",
        of="F1 P3",
        breaks="the receipt reports gone for a session whose programs left their parents",
        file="runtime/scope/stop.py",
        old="        if not self._proven and may_have_started(self.scope):",
        new="        if not self._proven and not self.scope:",
        tests=PASSES,
    ),
    Mutant(
        name="a stop joins a kill that has begun",
        of="F6 P3",
        breaks="a program that was started after the look of another kill is called gone",
        file="runtime/adoption/kill_passes.py",
        old="""
        with self._lock:
            self._waiting.append(asked)
        self._begin()
        return asked.answer
""",
        new="""
        with self._lock:
            if self._looking and tags.keys() <= self._under_way:
                self._taken.append(asked)
                return asked.answer
            self._waiting.append(asked)
        self._begin()
        return asked.answer
""",
        also=(
            (
                "            taken, self._waiting = self._waiting, []",
                """
            taken, self._waiting = self._waiting, []
            self._taken = taken
            self._under_way = {tag for asked in taken for tag in asked.tags}
""",
            ),
        ),
        tests=PASSES,
    ),
    Mutant(
        name="a kill for each stop",
        of="F6 P3",
        breaks="a hundred sessions that stop at once starve the loop",
        file="runtime/adoption/kill_passes.py",
        old="            if self._looking or not self._waiting:",
        new="            if not self._waiting:",
        tests=PASSES,
    ),
    Mutant(
        name="a stop that was asked for during a look is forgotten",
        of="F6 P3",
        breaks="a stop waits until its time is over for a kill that never happens",
        file="runtime/adoption/kill_passes.py",
        old="            self._hear(taken, done)\n            self._begin()",
        new="            self._hear(taken, done)",
        tests=PASSES,
    ),
    Mutant(
        name="a scope that does not die keeps the others waiting",
        of="F6 P3",
        breaks="one session with a program that cannot die makes all receipts late",
        file="runtime/adoption/kill_passes.py",
        old="            finished = [asked for asked in taken if asked.hear(done)]",
        new="            finished = list(taken) if all([asked.hear(done) for asked in taken]) else []",
        tests=PASSES,
    ),
    Mutant(
        name="gone is said of a kill that nobody answered",
        of="F1 P3",
        breaks="the receipt reports gone although no scan was possible",
        file="runtime/adoption/kill_passes.py",
        old="proven=not (self.left or self.survivors)",
        new="proven=not self.survivors",
        tests=PASSES,
    ),
    Mutant(
        name="adoption ends before the kills",
        of="F4 P12",
        breaks="what an abandoned thread starts while the host closes outlives it",
        file="host/host.py",
        old="""
            await kill_everything()
            self.parts.programs.close()
            self._adoption.restore()
""",
        new="""
            self._adoption.restore()
            await kill_everything()
            self.parts.programs.close()
""",
        tests=(STRAY,),
    ),
    Mutant(
        name="the host ends without a last kill",
        of="F4 P12",
        breaks="strays without an owner outlive the host",
        file="host/host.py",
        old="            await kill_everything()\n",
        new="            assert kill_everything\n",
        tests=(STRAY,),
    ),
    Mutant(
        name="strays are told in every receipt",
        of="F3 P14",
        breaks="a command line with one user's secrets stands in another one's receipt",
        file="runtime/scope/stop.py",
        old="            self._unattributed.append(STRANGER)",
        new="""
            import os

            from holdfast.runtime.processes import procfs

            self._unattributed += [f"{pid} {procfs.command(pid)}" for pid in procfs.children(os.getpid())]
""",
        tests=(STRAY,),
    ),
    Mutant(
        name="older strays make receipts unknown",
        of="F3 P3",
        breaks="after one stray of another user, no receipt reports gone any more",
        file="runtime/adoption/stranger_search.py",
        old="        mine = [one for one in left if one.started >= int(since)]",
        new="        mine = list(left)",
        tests=(STRAY,),
    ),
    Mutant(
        name="strays are not told",
        of="F2 P3",
        breaks="the receipt reports gone although C code of the session started a program that is alive",
        file="runtime/scope/stop.py",
        old="            self._unattributed.append(STRANGER)\n            self._unknown = True",
        new="            assert STRANGER",
        tests=(STRAY,),
    ),
    Mutant(
        name="the operator is told secrets of strays",
        of="F3 P2",
        breaks="a secret of the environment in a command line is in the log",
        file="runtime/adoption/stranger_search.py",
        old="        redact(stranger),",
        new="        stranger,",
        tests=(STRAY,),
    ),
    Mutant(
        name="what C code starts on a thread is nobody's",
        of="F2 P3",
        breaks="a program that C code waits for on a session's thread is not killed with it",
        file="runtime/adoption/stranger_search.py",
        old="            home = self._home(one.thread) if one.thread != self._tags.pid else None",
        new="            home = None",
        tests=(f"{PROGRAMS}::test_what_c_code_of_a_thread_waits_for_dies_with_the_session_of_the_thread",),
    ),
    Mutant(
        name="a fork bomb is looked for once",
        of="F5 P3",
        breaks="programs that multiply survive although the receipt reports gone",
        file="runtime/processes/tags.py",
        old="_CLEAN = 2",
        new="_CLEAN = 1",
        tests=CHASE,
    ),
    Mutant(
        name="who is struck does not leave others behind",
        of="F5 P3",
        breaks="what a program started just before its kill lives on",
        file="runtime/processes/tags.py",
        old="count + 1 if complete and tag not in found else 0 for tag, count",
        new="count + 1 if complete else 0 for tag, count",
        tests=CHASE,
    ),
    Mutant(
        name="a look that never caught up proves that nobody is left",
        of="F5 P3",
        breaks="a fork bomb that outruns every scan survives although the receipt reports gone",
        file="runtime/processes/tags.py",
        old="count + 1 if complete and tag not in found else 0 for tag, count",
        new="count + 1 if tag not in found else 0 for tag, count",
        tests=("tests/runtime/processes/test_tags.py",),
    ),
    Mutant(
        name="a worker that can be looked into",
        of="P14",
        breaks="a program of a tool reads what a worker of another user holds",
        file="runtime/workers/main.py",
        old="    make_undumpable()\n",
        new="    assert make_undumpable\n",
        tests=(UNDUMPABLE,),
    ),
    Mutant(
        name="a server that can be looked into",
        of="P14",
        breaks="a program of a tool reads every key of the server's memory",
        file="cli/serve.py",
        old="        if not settings.debuggers:",
        new="        if settings.debuggers and not settings:",
        tests=(UNDUMPABLE,),
    ),
    Mutant(
        name="workers start with the host's environment",
        of="P14",
        breaks="a tool's code reads the provider's keys in its environment",
        file="runtime/workers/pool.py",
        old="                env=start_environment(self.variables),",
        new="                env=None,",
        tests=(UNDUMPABLE,),
    ),
    Mutant(
        name="the zygote starts with the host's environment",
        of="P14",
        breaks="the provider's keys lie in the environment of every reaper",
        file="runtime/processes/zygote_link.py",
        old="                {**start_environment(), os.fsdecode(procfs.HOST_MARKER)",
        new="                {**os.environ, os.fsdecode(procfs.HOST_MARKER)",
        tests=(UNDUMPABLE,),
    ),
    Mutant(
        name="the clean environment passes everything",
        of="P14",
        breaks="the provider's keys lie in the environment of workers and reapers",
        file="runtime/processes/environment.py",
        old="        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)",
        new="        if patterns",
        tests=(UNDUMPABLE,),
    ),
)

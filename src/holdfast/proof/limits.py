"""The bounds that the checker applies to a storm."""

from __future__ import annotations

import msgspec

__all__ = ["Limits"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds that the checker applies to a storm, which are generous enough for a busy machine.

    Parameters:
        answer_s: maximum time from a request to its answer, for calls that do not wait for work.
        stop_s: maximum time from the request of a stop to its receipt: grace period, kill time and ``answer_s``.
        ready_s: maximum time from the start of a server to its first answer.
        death_s: maximum time from the kill of a host to the end of the host's last process.
        takeover_s: maximum time from the end of a host until others have restarted or ended its runs; 0 if not judged.
        fence_s: maximum time for which a host that was stopped may still work on runs that others have taken over.
        wake_s: maximum time from the end of a run until a branch that outlives the run sees the interrupt or ends.
        drain_slack_s: maximum time, in seconds, by which a drain may exceed its deadline.
        mailbox: maximum number of messages that may wait in a session; 0 if the server's limit is unknown.
        attempts: maximum number of times that a run may be started without completing a call.
        principal_runs: maximum number of concurrent runs of a principal; 0 if runs are not capped.
        share_factor: factor by which a backlogged consumer may get less or more than its even share.
        thread_slack, descriptor_slack: maximum number of threads, or of descriptors, that a quiet host may have in
            excess of its baseline.
        revoked_s: maximum time from a key's revocation to the last byte on the key's streams; the promise itself is one
            second.
        kept_memory: maximum growth of the server's memory, in bytes, once a hostile principal has released everything.
        descriptors: maximum number of the server's open descriptors in a storm with a hostile principal.
        bomb_slack: maximum factor by which a bomb may exceed the overshoot that its host states.
        given_up: maximum number of stops that a host gave up although the host that had the run was alive.
    """

    answer_s: float = 30.0
    stop_s: float = 40.0
    ready_s: float = 30.0
    death_s: float = 5.0
    takeover_s: float = 0.0
    fence_s: float = 5.0
    wake_s: float = 1.5
    drain_slack_s: float = 10.0
    mailbox: int = 100
    attempts: int = 4
    principal_runs: int = 0
    share_factor: float = 4.0
    thread_slack: int = 0
    descriptor_slack: int = 0
    revoked_s: float = 2.0
    kept_memory: int = 200_000_000
    descriptors: int = 1000
    bomb_slack: float = 4.0
    given_up: int = 1

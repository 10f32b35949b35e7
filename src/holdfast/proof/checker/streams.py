"""The rules of P7: honest streams."""

from __future__ import annotations

from holdfast.proof.checker.facts import ConnectionFacts, Facts, SessionLog
from holdfast.proof.checker.ledger import Ledger
from holdfast.proof.history import ReaderGap, SendAcknowledged
from holdfast.protocol.events import MessageSettled

__all__ = ["honest_streams"]


def honest_streams(facts: Facts, ledger: Ledger) -> None:
    """P7: every subscriber sees every event, in order, or an explicit gap; a cursor resumes without loss or repeat.

    *Observations*: each connection of a reader, and each log.

    *Violations*:

    - a log's seqs have a gap or a repeat, or are out of order;
    - a run in the log has no terminal event;
    - a connection's events are not consecutive from the connection's starting position, except where a gap frame covers
      the missing events (a resumed reader that misses or repeats events is one case);
    - a gap covers events that the reader had already received, or its reason is ``pruned`` although its events are
      still in the log;
    - a received event is not in the log, or differs from the event in the log;
    - the cursor of a receipt is not before the receipt's message;
    - the end of a connection was not recorded;
    - a reader stalled, or was reported as caught up before the newest event;
    - the stream of a reader that followed a message ended, but its last event was not that message's settlement.
    """
    for log in facts.logs.values():
        ledger.saw()
        for place, event in enumerate(log.events, 1):
            if event.seq != place:
                ledger.broken(f"the log has number {event.seq} in place {place}", log.where, event)
                break
        for run in log.runs.values():
            if run.started and not run.finished:
                ledger.broken("a run has no terminal event", log.where, run.started)
    for connection in facts.connections.values():
        where = (connection.opened.principal, connection.opened.session)
        _judge_connection(ledger, connection, facts.logs.get(where))
    for attempt, answer in facts.sends():
        if not isinstance(answer, SendAcknowledged) or answer.disposition == "duplicate":
            continue
        if answer.cursor >= answer.seq:
            ledger.broken("a receipt's cursor does not stand before its message", attempt, answer)


def _judge_connection(ledger: Ledger, connection: ConnectionFacts, log: SessionLog | None) -> None:
    ledger.saw()
    opened = connection.opened
    position = opened.after
    for received in connection.received:
        if isinstance(received, ReaderGap):
            if received.after < position or received.until < received.after:
                ledger.broken("a gap covers events that the reader had already", opened, received)
                return
            if received.after > position:
                ledger.broken("events are missing before a gap", opened, received, {"position": position})
                return
            if received.reason == "pruned" and log is not None and received.after + 1 in log.by_seq:
                ledger.broken("a gap is called pruned, but the log has the events", opened, received)
                return
            position = received.until
            continue
        for seq, mark in received.frames:
            if seq != position + 1:
                what = "repeated or out of order" if seq <= position else "missing"
                ledger.broken(f"an event is {what}: {seq} came after {position}", opened, {"at": received.at})
                return
            position = seq
            if log is None:
                continue
            known = log.digest_of(seq)
            if known is None:
                ledger.broken("a reader saw an event that the log does not have", opened, {"seq": seq})
                return
            if known != mark:
                ledger.broken("a reader saw another event than the log has", opened, log.by_seq[seq], {"digest": mark})
                return
    closed = connection.closed
    if closed is None:
        ledger.broken("the end of a reader's connection is unknown", opened)
        return
    if closed.why == "stalled":
        ledger.broken("a reader did not get events that exist", opened, closed, {"position": position})
    elif closed.why == "caught_up" and log is not None and log.events and position < log.events[-1].seq:
        ledger.broken("a reader was called caught up before the newest event", opened, closed, {"position": position})
    elif closed.why == "followed" and log is not None:
        last = log.by_seq.get(position)
        settled = log.settled.get(opened.follow or "")
        if position > opened.after and not (isinstance(last, MessageSettled) and last.message_id == opened.follow):
            ledger.broken("a followed stream did not end with the settlement of its message", opened, last)
        elif not settled:
            ledger.broken("a followed stream ended, but its message was never settled", opened, closed)

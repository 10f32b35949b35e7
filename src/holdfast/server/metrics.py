"""Host metrics as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from holdfast.host import PROMISES, HostStatistics
from holdfast.host.budgets import BudgetUsage

__all__ = ["render"]


def render(
    statistics: HostStatistics,
    *,
    streams: int,
    answers: Mapping[int, int],
    budgets: Mapping[str, BudgetUsage] = MappingProxyType({}),
) -> str:
    """Return the metrics of a host in the Prometheus text format 0.0.4.

    Parameters:
        statistics: statistics of the host.
        streams: number of open event streams.
        answers: number of HTTP responses by status.
        budgets: usage of each budget, by the name of the budget; includes the usage by the heaviest users.
    """
    families: list[tuple[str, str, str, Iterable[tuple[str, float]]]] = [
        ("holdfast_draining", "gauge", "1 while the host refuses new work", [("", int(statistics.draining))]),
        ("holdfast_sessions_live", "gauge", "sessions in memory", [("", statistics.sessions_live)]),
        ("holdfast_runs", "gauge", "runs that hold a slot", [("", statistics.running)]),
        ("holdfast_sessions_awaiting_slot", "gauge", "sessions that wait for a slot", [("", statistics.awaiting_slot)]),
        (
            "holdfast_sessions_awaiting_pool",
            "gauge",
            "sessions that wait for a host of a workspace_pool that no host declares",
            [("", statistics.awaiting_pool)],
        ),
        ("holdfast_event_subscribers", "gauge", "subscribers of event logs", [("", statistics.event_subscribers)]),
        ("holdfast_http_streams", "gauge", "open event streams over HTTP", [("", streams)]),
        ("holdfast_start_time_seconds", "gauge", "start time of the host", [("", statistics.started_at)]),
        (
            "holdfast_http_answers_total",
            "counter",
            "HTTP responses by status",
            [(f'{{status="{status}"}}', count) for status, count in sorted(answers.items())],
        ),
        (
            "holdfast_budget_used",
            "gauge",
            "usage of each budget in bytes, connections or seconds",
            [(f'{{budget="{name}"}}', usage.used) for name, usage in budgets.items()],
        ),
        (
            "holdfast_budget_used_by_principal",
            "gauge",
            "usage of each budget by its heaviest users",
            [
                (f'{{budget="{name}",principal="{_escape(principal)}"}}', amount)
                for name, usage in budgets.items()
                for principal, amount in usage.principals.items()
            ],
        ),
        (
            "holdfast_budget_refused_total",
            "counter",
            "charges refused because a budget or a share was used up",
            [(f'{{budget="{name}"}}', usage.refused) for name, usage in budgets.items()],
        ),
        (
            "holdfast_host_events_total",
            "counter",
            "host events by name",
            [(f'{{name="{_escape(name)}"}}', count) for name, count in sorted(statistics.counts.items())],
        ),
        (
            "holdfast_promise_kept_total",
            "counter",
            "observations of a kept promise",
            [(_promise(number, statistics), count.kept) for number, count in statistics.promises.items()],
        ),
        (
            "holdfast_promise_broken_total",
            "counter",
            "observations of a broken promise; expected to stay 0",
            [(_promise(number, statistics), count.broken) for number, count in statistics.promises.items()],
        ),
    ]
    lines = []
    for name, kind, text, samples in families:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{labels} {value:.15g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _promise(number: str, statistics: HostStatistics) -> str:
    name = PROMISES[number][0] if number in PROMISES else statistics.promises[number].name
    return f'{{promise="{_escape(number)}",name="{_escape(name)}"}}'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

"""The host: sessions, runs, and their control."""

from holdfast.host.host import Host
from holdfast.host.log_reader import LogReader, SessionLog
from holdfast.host.question_answers import Answerer
from holdfast.host.run_reports import RunListener, RunReport
from holdfast.host.scheduler import Schedule
from holdfast.host.session import Session
from holdfast.host.statistics import COUNTS, PROMISES, DrainReport, HostStatistics, Incident, PromiseCount, Recovery

__all__ = [
    "COUNTS",
    "PROMISES",
    "Answerer",
    "DrainReport",
    "Host",
    "HostStatistics",
    "Incident",
    "LogReader",
    "PromiseCount",
    "Recovery",
    "RunListener",
    "RunReport",
    "Schedule",
    "Session",
    "SessionLog",
]

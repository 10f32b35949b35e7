"""Nemesis: injects faults into a real server under load, and reports the findings.

The command ``holdfast storm --nemesis all`` injects all faults. In code, `run_faults` injects several faults by name,
and `run_against` injects one fault.
"""

from holdfast.proof.nemesis.episode import EpisodePlan
from holdfast.proof.nemesis.faults import FAULTS, Fault, chosen
from holdfast.proof.nemesis.runner import FaultOutcome, run_against, run_faults

__all__ = ["FAULTS", "EpisodePlan", "Fault", "FaultOutcome", "chosen", "run_against", "run_faults"]

"""A nemesis: faults injected into a real server under load, and the findings.

``holdfast storm --nemesis all`` runs it. From code, use `run_faults` for several by name, or `run_against` for one.
"""

from holdfast.proof.nemesis.episode import EpisodePlan
from holdfast.proof.nemesis.faults import FAULTS, Fault, chosen
from holdfast.proof.nemesis.runner import FaultOutcome, run_against, run_faults

__all__ = ["FAULTS", "EpisodePlan", "Fault", "FaultOutcome", "chosen", "run_against", "run_faults"]

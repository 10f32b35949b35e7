"""A nemesis: faults injected into a real server under load, and what they found.

``holdfast storm --nemesis all`` runs it. In code: `run_faults` for some by name, `run_against` for one.
"""

from holdfast.proof.nemesis.episode import Ask
from holdfast.proof.nemesis.faults import FAULTS, Fault, chosen
from holdfast.proof.nemesis.runner import Outcome, run_against, run_faults

__all__ = ["FAULTS", "Ask", "Fault", "Outcome", "chosen", "run_against", "run_faults"]

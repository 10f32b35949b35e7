"""A nemesis: faults injected into a real server under load, and what they found.

``holdfast storm --nemesis all`` runs it. In code: `run_faults` for some by name, `torment` for one.
"""

from holdfast.testing.nemesis.conduct import Outcome, run_faults, torment
from holdfast.testing.nemesis.episode import Ask
from holdfast.testing.nemesis.faults import FAULTS, Fault, chosen

__all__ = ["FAULTS", "Ask", "Fault", "Outcome", "chosen", "run_faults", "torment"]

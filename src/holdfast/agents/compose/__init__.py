"""Composite agents: several agents combined in parallel, in sequence, by choice, supervised or periodically.

Each composite is itself an `Agent`, so composites nest and run wherever an agent runs.
"""

from holdfast.agents.compose.branch_spec import BranchSpec, branch
from holdfast.agents.compose.parallel import parallel
from holdfast.agents.compose.periodic import periodic
from holdfast.agents.compose.route import route
from holdfast.agents.compose.sequence import sequence
from holdfast.agents.compose.supervised import supervised
from holdfast.protocol.supervision import BranchResult

__all__ = ["BranchResult", "BranchSpec", "branch", "parallel", "periodic", "route", "sequence", "supervised"]

"""Composite agents: several agents as one, in parallel, in sequence, by choice, supervised or periodic.

Each composite is an `Agent` itself, so they nest, and whatever runs one agent runs them.
"""

from holdfast.agents.compose.branch_spec import BranchSpec, branch
from holdfast.agents.compose.parallel import parallel
from holdfast.agents.compose.periodic import periodic
from holdfast.agents.compose.route import route
from holdfast.agents.compose.sequence import sequence
from holdfast.agents.compose.supervised import supervised
from holdfast.protocol.supervision import BranchResult

__all__ = ["BranchResult", "BranchSpec", "branch", "parallel", "periodic", "route", "sequence", "supervised"]

"""``python -m tests.mutants``: see `tests.mutants.lane`."""

from __future__ import annotations

import sys

from tests.mutants.lane import main

sys.exit(main())

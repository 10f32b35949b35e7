"""A fork bomb that leaves its session with each life: ``<seconds of life> <branches> <doublings> <file> <end>``.

Each life adds a byte to the file. It ends by itself after so many seconds, and is fenced: `tests/runtime/fence.py`.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.runtime.fence import put_up_fence

life_s, branches, doublings = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
end_at = time.monotonic() + float(sys.argv[5])
beat = os.open(sys.argv[4], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
put_up_fence()
for _ in range(branches - 1):
    if os.fork() == 0:
        break
while time.monotonic() < end_at:
    os.write(beat, b".")
    try:
        if doublings:
            doublings -= 1
            os.fork()
        if os.fork():
            os._exit(0)
        os.setsid()
    except OSError:
        pass
    if life_s:
        time.sleep(life_s)

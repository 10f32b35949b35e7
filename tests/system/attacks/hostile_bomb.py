"""A fork bomb that leaves its session with each life: ``<seconds of life> <branches> <doublings> <file>``.

Each life adds a byte to the file. It ends by itself after 25 seconds, whoever fails to end it before.
"""

import os
import sys
import time

life_s, branches, doublings = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
end_at = time.monotonic() + 25
for _ in range(branches - 1):
    if os.fork() == 0:
        break
beat = os.open(sys.argv[4], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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

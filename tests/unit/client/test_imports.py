"""A trainer's process loads nothing of the server for the client's sake, and needs no rich for it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
for name in ("rich", "uvloop", "starlette", "httptools", "zmq", "msgspec", "prometheus_client", "structlog", "uvicorn"):
    sys.modules[name] = None  # importing it fails
import asyncio
import tidegate.client as client
ours = sorted(name for name in sys.modules if name.startswith("tidegate.") and not name.startswith("tidegate.client"))
assert ours == [], ours

async def main():
    async with client.RolloutScheduler(None, progress=True) as gate:
        async with gate.session() as session:
            print(len(session.id))

asyncio.run(main())
"""


def test_the_client_stands_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "32"), done.stderr
    assert "no progress bar" in done.stderr

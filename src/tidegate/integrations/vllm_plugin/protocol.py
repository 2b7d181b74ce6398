"""What the router and the plugin have agreed on; told by GET /tidegate/info.

PROTOCOL rises when a call changes its meaning or its shape; a router uses the plugin only if both have the same one.
Calls that are added get a name in FEATURES instead.
"""

from __future__ import annotations

PROTOCOL = 1
FEATURES = ("release", "demote", "protect", "sessions")

MAX_SESSIONS_PER_CALL = 1024  # a call runs between two engine steps; a router's batch is far smaller
MAX_SESSION_ID_BYTES = 512  # the router takes 256; vLLM any

"""Open files: each client connection may need one to a replica too, so twice http.max_connections and some."""

from __future__ import annotations

import resource

import structlog

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate")

SPARE_FILES = 256  # listeners, logs, scrapes, KV event sockets


def ensure_open_files(max_connections: int) -> int:
    """Raises the soft limit as far as needed and allowed. The number of connections that fit; a warning if fewer."""
    needed = 2 * max_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):  # a sandbox may forbid it
            pass
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    fit = max(1, (soft - SPARE_FILES) // 2)
    log.warning(
        "too few open files for http.max_connections",
        open_files=soft,
        needed=needed,
        connections_that_fit=fit,
        remedy=f"ulimit -n {needed}, or --http-max-connections {fit}",
    )
    return fit

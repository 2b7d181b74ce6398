"""Open files: each client connection may need one to a replica too. What fails for want of them is this process's own
limit, and says nothing of the peer."""

from __future__ import annotations

import errno
import resource
import socket

import structlog

log: structlog.stdlib.BoundLogger = structlog.get_logger("tidegate")

SPARE_FILES = 256  # listeners, logs, idle connections, replicas that are added later
FILES_PER_REPLICA = 6  # a scrape, a probe, a control call, a hint, KV events and their signal

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def ensure_open_files(max_connections: int, replicas: int) -> int:
    """Raises the soft limit as far as needed and allowed. The number of client connections that fit, at most what was
    asked for; a warning if fewer."""
    spare = SPARE_FILES + FILES_PER_REPLICA * replicas
    needed = 2 * max_connections + spare
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
    fit = max(1, (soft - spare) // 2)
    log.warning(
        "too few open files for http.max_connections",
        open_files=soft,
        needed=needed,
        connections_that_fit=fit,
        remedy=f"ulimit -n {needed}, or --http-max-connections {fit}",
    )
    return fit


def out_of_files(error: OSError) -> bool:
    """Whether connecting failed here, before it reached anybody. A name that cannot be resolved may hide it: the
    resolver needs files of its own, and says that the name is not known."""
    if isinstance(error, socket.gaierror):
        try:
            socket.socket().close()
        except OSError as cause:
            return cause.errno in _OURS
        return False
    return error.errno in _OURS

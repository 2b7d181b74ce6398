"""What the server itself needs to know: where to listen, which replicas, who a request is, what is written down."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class ServerConfig(Struct, frozen=True, kw_only=True):
    worker_urls: Annotated[
        tuple[str, ...],
        Meta(description="Base URLs of the replicas. More can be added while running, with POST /workers."),
    ] = ()
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 30_000
    prometheus_host: Annotated[str, Meta(description="Address of the second port for /metrics.")] = "127.0.0.1"
    prometheus_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="A second port that serves /metrics alone. /metrics is on the main port in any case."),
    ] = None
    max_attempts: Annotated[
        int,
        Meta(
            ge=1,
            description="Replicas that may fail one request after it reached them. Another one is tried only while no "
            "byte of a response has gone to the client. A request that no replica can be connected to waits until one "
            "can; with 1 it does not.",
        ),
    ] = 3
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, description="On SIGTERM, running requests get this long; then their connections are cut."),
    ] = 30.0


class IdentityConfig(Struct, frozen=True, kw_only=True):
    session_headers: Annotated[
        tuple[str, ...],
        Meta(description="Further headers that name the session, looked at before the built-in ones."),
    ] = ()
    read_bodies: Annotated[
        bool,
        Meta(
            description="Decode the body for a session id if no header names one. Such a request waits until its "
            "body is whole. Off: it is a session of one request."
        ),
    ] = True
    user_is_session: Annotated[
        bool, Meta(description="Take the body's `user` for the session id if nothing else names one.")
    ] = False
    infer_sessions: Annotated[
        bool,
        Meta(
            description="Take a request that names no session for the next turn of the one whose prompt and reply its "
            "prompt goes on from, or else for a new one's first: see docs/clients.md. Off: it is a session of its own."
        ),
    ] = False
    infer_sessions_limit: Annotated[
        int,
        Meta(
            ge=1,
            description="Inferred sessions remembered, the longest unused forgotten first: about 1.2 KB each.",
        ),
    ] = 65_536


class LogConfig(Struct, frozen=True, kw_only=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], Meta(description="Least level that is written.")
    ] = "info"
    format: Annotated[
        Literal["auto", "console", "json"],
        Meta(description="auto: console on a terminal, else one JSON object a line. Logs go to stderr."),
    ] = "auto"


class RecordConfig(Struct, frozen=True, kw_only=True):
    path: Annotated[
        str | None,
        Meta(
            description="Decision log: every event with its decisions, as JSON lines; `tidegate replay` derives "
            "the decisions again. One that is there at start is kept as PATH.1. To rotate it, move it away and send "
            "SIGHUP (see docs/quickstart.md). None: not written."
        ),
    ] = None
    queue_lines: Annotated[
        int,
        Meta(
            ge=1,
            description="Lines that may wait for the disk. Beyond it lines are dropped, counted in "
            "tidegate_record_dropped_total, and the gap is written into the log: requests never wait for the disk.",
        ),
    ] = 100_000
    flush_s: Annotated[float, Meta(gt=0, description="Longest time a line waits before it is written.")] = 0.5

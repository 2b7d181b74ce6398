"""The configuration: one frozen tree. A field's description is its --help and its line in docs/configuration.md.

Layers, each over the one before: the defaults here, a TOML file, the environment (TIDEGATE_SECTION_FIELD), flags.
Policy constants are `tidegate.policy.params`, mounted here as `core`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from tidegate.config.engines import EnginesConfig
from tidegate.config.server import IdentityConfig, LogConfig, RecordConfig, ServerConfig
from tidegate.policy.params import CoreParams

Seconds = Annotated[float, Meta(gt=0)]


class HttpConfig(Struct, frozen=True, kw_only=True):
    max_header_bytes: Annotated[
        int, Meta(ge=1024, description="Request line and headers together; more is answered 431.")
    ] = 65_536
    max_body_bytes: Annotated[
        int, Meta(ge=1, description="A request body; more is answered 413. 256 MiB holds 30M token ids.")
    ] = 268_435_456
    buffer_bytes: Annotated[
        int,
        Meta(ge=4096, description="Bytes kept for one direction of one request before the sender is told to wait."),
    ] = 262_144
    replay_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Sent bytes of a request kept until its response begins, so that it can leave a replica that "
            "fails; a longer body is let go as it is sent, and that failure answered 502. 1 MiB holds 140k token ids.",
        ),
    ] = 1_048_576
    replay_total_bytes: Annotated[
        int, Meta(ge=0, description="The same for all requests together; more are let go as they are sent.")
    ] = 1_073_741_824
    header_timeout_s: Annotated[
        float, Meta(gt=0, description="From a connection's first byte to the end of the headers; 408 after it.")
    ] = 30.0
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="Without a byte of a body that we are reading; 408 after it.")
    ] = 60.0
    keep_alive_s: Annotated[float, Meta(gt=0, description="An idle client connection is closed after this.")] = 75.0
    connect_timeout_s: Annotated[
        float, Meta(gt=0, description="To open a connection to a replica; then the request leaves it.")
    ] = 5.0
    upstream_keep_alive_s: Annotated[
        float,
        Meta(
            gt=0,
            description="An idle connection to a replica is closed after this: below vLLM's own 5 s, or both "
            "ends race.",
        ),
    ] = 4.0
    response_timeout_s: Annotated[
        Seconds | None,
        Meta(
            description="Without a byte from a replica that owes one. None: as long as it takes; long "
            "generations send nothing for hours, and a hung replica is found by its health and progress."
        ),
    ] = None
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Client connections; further ones are answered 503. At start no more than the limit of open "
            "files allows, at two each.",
        ),
    ] = 16_384


class Config(Struct, frozen=True, kw_only=True):
    policy: Annotated[str, Meta(description="Who enters, and where: see docs/policies.md.")] = "working_set"
    seed: Annotated[
        int, Meta(ge=0, description="Of the policies' random choices: the same log, the same decisions.")
    ] = 0
    server: ServerConfig = ServerConfig()
    http: HttpConfig = HttpConfig()
    identity: IdentityConfig = IdentityConfig()
    core: CoreParams = CoreParams()
    engines: EnginesConfig = EnginesConfig()
    log: LogConfig = LogConfig()
    record: RecordConfig = RecordConfig()

"""What an engine is to the gate: names of its metrics, paths of its controls, and what they mean.

An adapter is knowledge, not I/O: it says what to ask and reads the answers. `monitor`, `control` and `kv_events` do
the asking. Two adapters exist, `vllm` and `sglang`; a replica's adapter is found by `detect` and may be found late, so
everything works, with less knowledge, before it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from tidegate.engines.prometheus import Reading, Samples, whole

EngineName: TypeAlias = Literal["vllm", "sglang"]

# What msgspec raises for bytes that are not what was asked for; nesting without end is no DecodeError.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Action: TypeAlias = Literal[
    "pause", "resume", "is_paused", "reset_prefix_cache", "abort", "abort_all", "sleep", "wake_up"
]
"""Controls that both engines know under different names. Options: pause mode=abort|wait|keep and clear_cache;
abort ids; sleep level; wake_up tags."""


class ControlCall(Struct, frozen=True, kw_only=True):
    method: str
    path: str
    query: str = ""
    body: bytes | None = None  # JSON


class KvSource(Struct, frozen=True, kw_only=True):
    """Where one data-parallel rank publishes its KV events."""

    rank: int
    endpoint: str  # to connect to
    replay_endpoint: str | None = None
    topic: str = ""


class EngineAdapter(Protocol):
    @property
    def name(self) -> EngineName: ...

    @property
    def metrics_prefix(self) -> str:
        """What the engine's own metric names begin with."""
        ...

    @property
    def metric_names(self) -> frozenset[str]:
        """All series that `read` looks at, old names and new."""
        ...

    def read(self, samples: Samples) -> Reading: ...

    @property
    def loads_path(self) -> str | None:
        """Where an engine whose /metrics is off tells its load all the same."""
        ...

    def read_loads(self, body: bytes) -> Reading | None: ...

    @property
    def health_path(self) -> str: ...

    @property
    def pause_probe_path(self) -> str: ...

    def paused(self, status: int, body: bytes, *, was_healthy: bool) -> bool | None:
        """What the answer to the pause probe says; None: this replica does not tell."""
        ...

    @property
    def pause_clears_cache(self) -> bool:
        """Whether a pause, as it is made by default, empties the prefix cache."""
        ...

    @property
    def keeps_sessions(self) -> bool:
        """Whether clients can open sessions in it (/open_session), which it keeps until they are closed."""
        ...

    @property
    def kv_sources_path(self) -> str: ...

    def kv_sources(self, body: bytes, host: str) -> list[KvSource]:
        """The publishers that the answer names, to be reached at `host` where it gives a wildcard."""
        ...

    def calls(self, action: Action, options: Mapping[str, str]) -> tuple[ControlCall, ...]:
        """How this engine spells an action, in the order in which to call; empty: it has no such thing."""
        ...

    def goes_cold(self, path: str, query: str, body: bytes) -> bool:
        """Whether a control call that succeeded leaves the prefix cache empty."""
        ...


def configured_kv_sources(endpoints: str, host: str, ranks: int) -> list[KvSource]:
    """From "tcp://*:5557" or "tcp://*:5557,tcp://*:5558", the replay socket second; rank r is at port + r."""
    publisher, _, replayer = endpoints.partition(",")
    sources = []
    for rank in range(ranks):
        endpoint = reachable_endpoint(publisher.strip(), host, port_offset=rank)
        if endpoint is not None:
            replay = reachable_endpoint(replayer.strip(), host, port_offset=rank)
            sources.append(KvSource(rank=rank, endpoint=endpoint, replay_endpoint=replay))
    return sources


def reachable_endpoint(endpoint: str, host: str, *, port_offset: int = 0) -> str | None:
    """`endpoint` as a subscriber connects to it: a wildcard becomes the replica's host. None if it cannot be reached
    from another process."""
    if endpoint.startswith("ipc://"):
        return endpoint
    if not endpoint.startswith("tcp://"):
        return None
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    number = whole(port)
    if not number:
        return None
    if address in ("*", "0.0.0.0", "[::]", "::"):
        address = f"[{host}]" if ":" in host else host
    return f"tcp://{address}:{number + port_offset}"

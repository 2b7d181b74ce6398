"""How replicas are watched: scrapes, probes, ejection, KV events, control calls. Mounted in the configuration as
`engines`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class EnginesConfig(Struct, frozen=True, kw_only=True):
    scrape_period_s: Annotated[
        float,
        Meta(gt=0, description="Between two readings of a replica's /metrics, each moved by up to a tenth."),
    ] = 1.0
    scrape_timeout_s: Annotated[
        float, Meta(gt=0, description="For one reading; an engine busy with a long step answers late.")
    ] = 2.0
    health_period_s: Annotated[float, Meta(gt=0, description="Between two health probes of a replica.")] = 2.0
    health_timeout_s: Annotated[
        float,
        Meta(gt=0, description="For one probe. SGLang takes at least 1 s, since it generates a token to answer."),
    ] = 5.0
    unhealthy_after: Annotated[
        int, Meta(ge=1, description="Failed probes in a row (refused, unreachable or 5xx) before a replica is left.")
    ] = 2
    eject_after: Annotated[
        int,
        Meta(
            ge=1,
            description="Connection failures of requests in a row, with no answer between them, before a replica is "
            "ejected. An answer of any status is not a failure.",
        ),
    ] = 3
    eject_s: Annotated[
        float, Meta(gt=0, description="The first ejection lasts this long; each further one twice as long.")
    ] = 2.0
    eject_max_s: Annotated[float, Meta(gt=0, description="No ejection is longer.")] = 60.0
    drain_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A replica that answered a new request with an empty abort is left for this long (it is "
            "shutting down), then tried again, twice as long each time.",
        ),
    ] = 30.0
    livelock_after_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Requests waiting, none running and no token made for this long: sick, not free. Longer than "
            "any pause between engine steps.",
        ),
    ] = 30.0
    stalled_after_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Health hanging and no token made for this long: left, unless it is the last one. Longer than "
            "a compilation during the first requests (108 s were reported).",
        ),
    ] = 120.0
    lost_after_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A replica that cannot be connected to for this long has lost its requests: those without a "
            "byte of an answer go to another one.",
        ),
    ] = 15.0
    kv_capacity_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="A replica's KV capacity, where it is not to be read from the engine."),
    ] = None
    kv_capacity_tokens_by_url: Annotated[
        dict[str, Annotated[int, Meta(ge=1)]],
        Meta(description="The same for single replicas, by URL; wins over the former."),
    ] = {}
    kv_events: Annotated[
        Literal["auto", "off"],
        Meta(description="auto: subscribe to the KV events of every replica that publishes them."),
    ] = "auto"
    kv_event_endpoints: Annotated[
        dict[str, str],
        Meta(
            description="ZMQ endpoints by replica URL, for engines that do not tell theirs: tcp://*:5557, or "
            "tcp://*:5557,tcp://*:5558 with the replay socket second. * stands for the replica's host."
        ),
    ] = {}
    kv_event_ranks: Annotated[
        int,
        Meta(ge=1, description="Data-parallel ranks behind each of `kv_event_endpoints`: rank r is at port + r."),
    ] = 1
    kv_event_block_limit: Annotated[
        int,
        Meta(
            ge=1024,
            description="KV blocks remembered for one replica. Beyond it residency is unknown; 4M blocks of 16 tokens "
            "are 64M tokens.",
        ),
    ] = 4_194_304
    kv_replay_timeout_s: Annotated[
        float, Meta(gt=0, description="To replay missed KV events; beyond it residency starts anew, as unknown.")
    ] = 5.0
    residency_period_s: Annotated[float, Meta(gt=0, description="Between two reports of resident KV by session.")] = 1.0
    orca: Annotated[
        Literal["off", "text", "json"],
        Meta(
            description="Ask each response for the replica's load (ORCA `endpoint-load-metrics`), by a header added to "
            "relayed requests. The answer's header is then passed on to the client."
        ),
    ] = "off"
    control_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="For a control call that is fanned out (pause, weight update); a pause that waits for running "
            "requests takes as long as they do.",
        ),
    ] = 600.0
    name_sessions: Annotated[
        bool,
        Meta(
            description="A session that the client named in another way than by X-Session-ID is named to the replica "
            "by a header of that name, so that its KV events and its plugin know it."
        ),
    ] = True
    plugin: Annotated[
        Literal["auto", "off"],
        Meta(
            description="auto: tell engines that have tidegate's plugin which sessions ended, pause and go on, so that "
            "they evict in that order; see docs/vllm-plugin.md."
        ),
    ] = "auto"
    plugin_timeout_s: Annotated[
        float,
        Meta(gt=0, description="For a call to an engine's plugin; it waits for the step under way, no request for it."),
    ] = 5.0
    plugin_key_file: Annotated[
        str | None,
        Meta(description="A file with the API key for these calls, for engines that were started with --api-key."),
    ] = None
    connect_timeout_s: Annotated[float, Meta(gt=0, description="To open a connection for a probe or a call.")] = 3.0
    keep_alive_s: Annotated[
        float, Meta(gt=0, description="An idle connection of these calls is closed: below vLLM's own 5 s.")
    ] = 4.0

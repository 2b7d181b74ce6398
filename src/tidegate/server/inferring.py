"""Sessions of clients that name none, inferred from their prompts: opt-in, by `identity.infer_sessions`.

A request that no header and no body key gives a session is looked up by what its prompt begins with (`lineage`), and
gets the id of the session that it goes on with, or a new one. What the replica replies is kept as it passes, up to a
bound, and read when it is over. To all else an inferred session is one like any other, but for its end, which nobody
will announce: the idle time of its class ends it.
"""

from __future__ import annotations

import itertools
import secrets

import msgspec

from tidegate.config.server import IdentityConfig
from tidegate.errors import ConfigError
from tidegate.observe.counters import ClassCounters
from tidegate.proxy.identity import Identifier, Identity
from tidegate.proxy.seam import Exchange, RequestHead, Verdict
from tidegate.proxy.usage import Watcher
from tidegate.server.conversation import prompt_of
from tidegate.server.entry import Entry
from tidegate.server.lineage import Lineage, Turn
from tidegate.server.replies import replies_of

MAX_REPLY_BYTES = 1_048_576  # kept of a reply while it passes: 8k tokens of a stream with their events; a longer one is
# not read, and its session gone on with by its prompt alone


class InferringIdentifier(Identifier):
    """`head.tag` is the request's Turn, after `identify` has inferred its session."""

    def __init__(
        self, *, max_sessions: int, session_headers: tuple[str, ...] = (), user_is_session: bool = False
    ) -> None:
        super().__init__(session_headers=session_headers, user_is_session=user_is_session)
        ids, process = itertools.count(1), secrets.token_hex(4)  # a client's ids must not meet ours, nor a log's parts
        self.lineage = Lineage(max_sessions, lambda: f"inferred-{process}-{next(ids)}")

    def identify(self, head: RequestHead, body: bytes | None) -> Identity:
        identity = super().identify(head, body)
        if identity.session is not None or body is None or identity.encoded:
            return identity
        prompt = prompt_of(head.path, body)
        if prompt is None:
            return identity
        turn = self.lineage.arrived(prompt)
        head.tag = turn
        return msgspec.structs.replace(identity, session=turn.session)


class InferredEntry(Entry):
    """Keeps what passes of the reply."""

    def __init__(
        self, exchange: Exchange, watcher: Watcher, identity: Identity, counters: ClassCounters, arrived_s: float
    ) -> None:
        super().__init__(exchange, watcher, identity, counters, arrived_s)
        assert isinstance(exchange.head.tag, Turn)
        self._owed: Turn | None = exchange.head.tag
        self._reply: bytearray | None = bytearray()  # None: too much

    def response_body(self, chunk: bytes) -> Verdict:
        reply = self._reply
        if reply is not None:
            reply += chunk
            if len(reply) > MAX_REPLY_BYTES:
                self._reply = None
        return super().response_body(chunk)

    def begin_anew(self) -> None:
        super().begin_anew()
        self._reply = bytearray()

    def over(self) -> None:
        turn, self._owed = self._owed, None
        if turn is None:
            return
        replies: list[bytes] | None = None
        if self.status == 200:
            reply = self._reply
            replies = [] if reply is None else replies_of(self.exchange.head.path, turn.prompt.kind, bytes(reply))
        turn.table.ended(turn, replies)


def entry_type(head: RequestHead) -> type[Entry]:
    return InferredEntry if isinstance(head.tag, Turn) else Entry


def identifier_of(config: IdentityConfig) -> Identifier:
    """Raises ConfigError for settings that exclude each other."""
    if not config.infer_sessions:
        return Identifier(
            session_headers=config.session_headers,
            read_bodies=config.read_bodies,
            user_is_session=config.user_is_session,
        )
    if not config.read_bodies:
        raise ConfigError("identity.infer_sessions needs identity.read_bodies: prompts are in the bodies")
    return InferringIdentifier(
        max_sessions=config.infer_sessions_limit,
        session_headers=config.session_headers,
        user_is_session=config.user_is_session,
    )

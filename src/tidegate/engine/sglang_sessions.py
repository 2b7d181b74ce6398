"""SGLang's sessions: what a client has asked in one stays with the engine, and a request brings only what is new.

/open_session {capacity_of_str_len, session_id?}   the id, which the engine draws if the client gives none
/generate {session_params: {id, rid?}, ...}        `rid` names the request of the session that this one goes on from
/close_session {session_id}                        all of it is let go; unknown ids are fine
"""

from __future__ import annotations

import uuid

from tidegate.engine.http import Refusal


class OpenSessions:
    def __init__(self) -> None:
        self._contexts: dict[str, dict[str, bytes]] = {}  # by session, then by request: its prompt and reply, packed
        self.closed = 0

    def __len__(self) -> int:
        return len(self._contexts)

    def open(self, session: str | None) -> str:
        session = session or uuid.uuid4().hex
        if session in self._contexts:
            raise Refusal("Failed to open the session. Check if a session with the same id is still open.")
        self._contexts[session] = {}
        return session

    def close(self, session: str) -> None:
        self.closed += self._contexts.pop(session, None) is not None

    def context(self, session: str, request: str | None) -> bytes:
        """What comes before a request that goes on from `request`; nothing if that is None."""
        contexts = self._contexts.get(session)
        if contexts is None:
            raise Refusal(f"Invalid request: session id {session} does not exist", param="session_params")
        if request is None:
            return b""
        if request not in contexts:
            raise Refusal(f"Invalid request: requested rid {request} does not exist", param="session_params")
        return contexts[request]

    def keep(self, session: str, request: str, context: bytes) -> None:
        if session in self._contexts:
            self._contexts[session][request] = context

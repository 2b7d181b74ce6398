"""A request's body on its way: what has come, kept for as long as the request may have to be placed again.

Bounded twice: `http.replay_bytes` for a request and `http.replay_total_bytes` for all. Bytes that have been sent and
are too many are let go, and with them the chance of another try; bytes that have not been sent are never let go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.proxy import chunked

if TYPE_CHECKING:
    from tidegate.proxy.relay import Listener
    from tidegate.proxy.seam import Chunk


class RequestBody:
    __slots__ = ("_chunked", "_chunks", "_listener", "_size", "complete", "whole")

    def __init__(self, listener: Listener, data: Chunk, *, complete: bool, is_chunked: bool) -> None:
        self._listener = listener
        self._chunked = is_chunked
        self._chunks: list[Chunk] = [data]
        self._size = len(data)
        listener.replay_bytes += self._size
        self.complete = complete  # the client has sent all of it
        self.whole = True  # all that has come is still here

    def add(self, data: Chunk) -> None:
        if self.whole:
            self._chunks.append(data)
            self._size += len(data)
            self._listener.replay_bytes += len(data)

    def payload(self) -> Chunk:
        """All that has come; only if `whole`."""
        chunks = self._chunks
        if len(chunks) > 1:
            chunks[:] = [b"".join(chunks)]
        return chunks[0]

    def framed(self, data: Chunk) -> Chunk:
        """As it goes on to a replica; `data` must be the last that came."""
        if not self._chunked:
            return data
        coded = chunked.encode(bytes(data)) if data else b""
        return coded + chunked.LAST_CHUNK if self.complete else coded

    def full(self) -> bool:
        """Too much has come to read on before any of it is sent."""
        config = self._listener.config
        return self._size > config.replay_bytes and self._size > config.buffer_bytes

    def sent(self) -> None:
        """All that has come is sent."""
        listener = self._listener
        if self._size > listener.config.replay_bytes or listener.replay_bytes > listener.config.replay_total_bytes:
            self.let_go()

    def let_go(self) -> None:
        if self.whole:
            self.whole = False
            self._listener.replay_bytes -= self._size
            self._chunks.clear()

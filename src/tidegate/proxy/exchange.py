"""One relayed request, from its head to its last byte: the state machine between a client and a replica.

    opened -> WAITING -place-> (CONNECTING) -> SENT -> response head -> [KEPT BACK] -> STREAMING -> ended
                 ^                  |            |            |
                 +----- returned ---+------------+--- retry --+         reject: answered with an error, no `ended`

Request bytes are kept until the head of the response goes out, so that the request can be placed again; those that are
too many to keep (`request_body`) are not, and a failure of the replica is then answered 502. A reused connection that
closes without a byte of response is the keep-alive race, not a failure: the same replica is asked once more on a fresh
connection.

While a request waits, its body is read up to the same bound, not just `http.buffer_bytes`: a client that leaves is seen
only if all that it sent has been taken in, by us or by the socket's own buffer. One that leaves with still more on its
way is seen when reading goes on.

After the first byte of a response nothing is replayed. If nothing has gone to the client it gets a 502, else its
connection is cut so that the message is seen to be short: no end is made up.

`ended` is called exactly once for each opened exchange that was not rejected: `_settle` is the only caller, every exit
goes through it, and it forgets the handler.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Final

from tidegate.errors import ReplicaError, TidegateError
from tidegate.proxy import chunked
from tidegate.proxy.framing import CHUNKED
from tidegate.proxy.http1_client import UpstreamConnection, refusal
from tidegate.proxy.http1_head import RequestLines, ResponseLines
from tidegate.proxy.http1_server import ClientConnection
from tidegate.proxy.request_body import RequestBody
from tidegate.proxy.seam import Chunk, Handler, Headers, Meter, RequestHead, Verdict
from tidegate.types import Outcome, ReplicaId

if TYPE_CHECKING:
    from tidegate.proxy.pool import ReplicaPool
    from tidegate.proxy.relay import Listener

log = logging.getLogger("tidegate.proxy")

KEPT_BACK_BYTES: Final = 16_384  # of a response whose meter has not decided: any error object, not a generation
_ids: Final = itertools.count(1)


class RelayExchange:
    __slots__ = (
        "_body", "_chunked_out", "_client", "_close_ends", "_collecting", "_connecting", "_done", "_handler",
        "_head_sent", "_kept_back", "_listener", "_onward", "_replica", "_reply_head", "_status", "_upstream",
        "_waiting", "head", "http_1_0", "id", "meter", "method",
    )  # fmt: skip

    def __init__(
        self,
        listener: Listener,
        client: ClientConnection,
        head: RequestHead,
        request: RequestLines,
        body: Chunk,
        complete: bool,
    ) -> None:
        self.id = next(_ids)
        self.head = head
        self.meter: Meter | None = None
        self.method = head.method
        self.http_1_0 = client.http_1_0
        self._listener = listener
        self._handler: Handler | None = None  # set while `ended` is owed
        self._client = client
        self._onward = request.onward
        # the request
        self._body = RequestBody(listener, body, complete=complete, is_chunked=request.length == CHUNKED)
        self._collecting = False  # the handler wants the whole body first
        # the way to a replica
        self._waiting = False  # for place or reject
        self._replica: ReplicaPool | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: UpstreamConnection | None = None
        # the response
        self._status = 0
        self._reply_head = b""  # ready to go out
        self._kept_back: list[bytes] | None = None  # body bytes, while the meter waits
        self._chunked_out = False
        self._close_ends = False  # the end of the response is the end of the connection
        self._head_sent = False
        self._done = False

    # --- from the client ----------------------------------------------------------------------------------------
    def open(self) -> None:
        if self._listener.handler.wants_body(self.head):
            self._collecting = True
            if self._body.complete:
                self._open(bytes(self._body.payload()))
            else:
                self._client.send_continue()
        else:
            self._open(None)

    def _open(self, whole: bytes | None) -> None:
        body = self._body.payload()
        self._collecting = False
        self._waiting = True
        self._handler = self._listener.handler
        self._handler.opened(self, whole)
        if body and self.meter is not None:
            self.meter.request_body(body)

    def request_data(self, data: bytes, complete: bool) -> None:
        body = self._body
        body.complete = complete
        if self._done:
            self._answered_early(data)
            return
        body.add(data)
        if self._collecting:
            if complete:
                self._open(bytes(body.payload()))
            return
        if self.meter is not None:
            self.meter.request_body(data)
        if self._upstream is not None:
            self._upstream.write(body.framed(data))
            body.sent()
        elif body.full():
            self._client.pause_body()

    def request_failed(self, error: TidegateError) -> bool:
        self._leave_upstream()
        self._settle("aborted", error)
        return not self._head_sent

    def client_gone(self) -> None:
        self._leave_upstream()
        self._settle("aborted", None)

    def pause_response(self) -> None:
        if self._upstream is not None:
            self._upstream.pause_reading()

    def resume_response(self) -> None:
        if self._upstream is not None:
            self._upstream.resume_reading()

    # --- from the handler ---------------------------------------------------------------------------------------
    def place(self, replica: ReplicaId) -> None:
        if not self._takes_decision():
            return
        pool = self._listener.pool
        self._replica = pool.replica(replica)
        self._waiting = False
        # a body that will not be kept must not meet the keep-alive race
        kept = (self.head.content_length or 0) <= self._listener.config.replay_bytes
        upstream = pool.take(self._replica) if kept else None
        if upstream is not None:
            self._send(upstream)
        else:
            self._connect(self._replica)

    def reject(self, error: TidegateError) -> None:
        if not self._takes_decision():
            return
        self._handler = None
        self._settle("refused", error)
        self._client.reply_error(error, keep_alive=True)

    def _takes_decision(self) -> bool:
        """False: too late, the client has gone."""
        if not (self._waiting or self._done):
            raise RuntimeError(f"exchange {self.id} is not waiting for a decision")
        return not self._done

    def name_session(self, session: bytes) -> None:
        self._onward = b"X-Session-ID: %b\r\n%b" % (session, self._onward)

    def recall(self, error: ReplicaError) -> None:
        if self._done or self._upstream is None or self._status or not self._body.complete:
            return
        self._leave_upstream()
        if self._body.whole:
            self._give_back(error)
        else:
            self._answer(error)

    def _give_back(self, error: ReplicaError) -> None:
        assert self._handler is not None
        assert self._replica is not None
        self._waiting = True
        try:
            self._handler.returned(self, self._replica.url, error)
        except Exception:
            log.exception("fault in the handler of a returned exchange")
            self._answer(TidegateError("Internal error"))

    # --- to the replica -----------------------------------------------------------------------------------------
    def _connect(self, replica: ReplicaPool) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._connected(replica))

    async def _connected(self, replica: ReplicaPool) -> None:
        try:
            try:
                upstream = await self._listener.pool.connect(replica)
            except ReplicaError as error:
                self._connecting = None
                self._give_back(error)
            else:
                self._connecting = None
                self._send(upstream)
        except Exception:
            log.exception("fault while placing an exchange")
            self._answer(TidegateError("Internal error"))

    def _send(self, upstream: UpstreamConnection) -> None:
        assert self._replica is not None
        self._upstream = upstream
        self._status = 0
        replica, target, body = self._replica, self.head.target, self._body
        if replica.prefix and target != b"*":
            target = replica.prefix + target
        if not body.complete:
            self._client.resume_body()
            self._client.send_continue()
        head = b"%b %b%b%b" % (self.method.encode("ascii"), target, replica.head_prefix, self._onward)
        upstream.begin(self, head, body.framed(body.payload()))
        body.sent()

    def response_owed(self) -> bool:
        return self._body.complete

    def pause_request(self) -> None:
        self._client.pause_body()

    def resume_request(self) -> None:
        self._client.resume_body()

    def _leave_upstream(self) -> None:
        """Stop what is under way for this exchange."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()

    # --- from the replica ---------------------------------------------------------------------------------------
    def informational(self, response: ResponseLines) -> None:
        if not self.http_1_0 and not self._done:
            self._client.write(response.onward + b"\r\n")

    def response_head(self, response: ResponseLines, *, complete: bool) -> bool:
        self._status = response.status
        self._chunked_out = response.length == CHUNKED and not self.http_1_0
        self._close_ends = response.length < 0 and not self._chunked_out
        self._reply_head = response.onward
        verdict: Verdict = "pass"
        if self.meter is not None:
            verdict = self.meter.response_head(response.status, response.headers)
        if verdict == "retry" and self._retry(response.headers):
            return False
        if verdict == "wait":
            self._kept_back = []
        if complete:
            self.response_data(b"", complete=True)
        return True

    def response_data(self, data: bytes, *, complete: bool) -> None:
        if self._done:
            return
        verdict: Verdict = "pass"
        if self.meter is not None:
            if data:
                verdict = self.meter.response_body(data)
            if complete and (verdict != "retry" or self._kept_back is None):
                verdict = self.meter.response_end()
        if self._kept_back is not None:
            if verdict == "retry" and self._retry(()):
                return
            self._kept_back.append(data)
            if verdict == "wait" and not complete and sum(map(len, self._kept_back)) <= KEPT_BACK_BYTES:
                return
            data, self._kept_back = b"".join(self._kept_back), None
        if self._chunked_out:
            if data:
                data = chunked.encode(data)
            if complete:
                data += chunked.LAST_CHUNK
        if self._reply_head:
            data = self._take_reply_head() + data
        self._client.write(data)
        if complete:
            self._finish()

    def flush(self) -> None:
        if self._reply_head and self._kept_back is None and not self._done:
            self._client.write(self._take_reply_head())

    def _take_reply_head(self) -> bytes:
        """From here on the request is not replayed."""
        head, self._reply_head = self._reply_head, b""
        self._head_sent = True
        self._body.let_go()
        if self._close_ends or self._client.will_close():
            return head + b"Connection: close\r\n\r\n"
        if self.http_1_0:
            return head + b"Connection: keep-alive\r\n\r\n"
        return head + b"\r\n"

    def _retry(self, headers: Headers) -> bool:
        """The meter wants another replica. False: the request's bytes are gone, so the response goes on."""
        if not self._body.whole:
            return False
        assert self._replica is not None
        upstream, self._upstream = self._upstream, None
        self._reply_head, self._kept_back = b"", None
        if upstream is not None:
            upstream.release(request_sent=self._body.complete)
        self._give_back(refusal(self._replica.url, self._status, headers))
        return True

    def _finish(self) -> None:
        """The response is whole. A replica that answered before it had the whole request still gets the rest of it, so
        that both connections live on; only if its own is at its end is the rest left unread."""
        upstream = self._upstream
        assert upstream is not None
        complete = self._body.complete
        early = not complete and upstream.can_be_kept()
        if not early:
            self._upstream = None
            upstream.release(request_sent=complete)
        self._settle("ok" if self._status < 400 else "refused" if self._status in (429, 503) else "error", None)
        if not early:
            self._client.response_done(keep_alive=not self._close_ends)

    def _answered_early(self, data: bytes) -> None:
        upstream = self._upstream
        if upstream is not None:
            upstream.write(self._body.framed(data))
            if self._body.complete:
                self._upstream = None
                upstream.release(request_sent=True)
                self._client.response_done(keep_alive=not self._close_ends)

    def upstream_lost(self, error: ReplicaError, *, silent: bool) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is None:
            return
        if self._done:  # answered early; nobody takes the rest of the request
            self._client.response_done(keep_alive=False)
        elif not silent or not self._body.whole:
            self._answer(error)
        elif upstream.reused and error.reason == "replica_closed":
            assert self._replica is not None
            self._connect(self._replica)
        else:
            self._give_back(error)

    # --- ends ---------------------------------------------------------------------------------------------------
    def _answer(self, error: TidegateError) -> None:
        """The replica's failure is the client's answer."""
        if self._done:
            return
        self._leave_upstream()
        self._settle("replica_lost", error)
        if self._head_sent:
            self._client.cut(reset=self._close_ends)
        else:
            self._client.reply_error(error, keep_alive=True)

    def _settle(self, outcome: Outcome, error: TidegateError | None) -> None:
        if self._done:
            return
        self._done = True
        self._body.let_go()
        handler, self._handler = self._handler, None
        self._listener.exchange_ended()
        if handler is not None:
            try:
                handler.ended(self, outcome, error)
            except Exception:
                log.exception("fault in the handler at the end of an exchange")
        self.meter = None  # it may hold this exchange: a circle would wait for the garbage collector

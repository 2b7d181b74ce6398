"""A replica that streams: each completion is 50 chunks, each written by itself in its own turn of the event loop.

python bench/relay_files/sse.py PORT
"""

from __future__ import annotations

import asyncio
import sys

import httptools
import uvloop

CHUNKS = 50
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":" out",'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Replica(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.parser = httptools.HttpRequestParser(self)
        self.left = 0

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self.parser.get_method() != b"POST":
            self.transport.write(JSON)
            return
        self.left = CHUNKS
        self.transport.write(HEAD)
        asyncio.get_running_loop().call_soon(self.step)

    def step(self) -> None:
        if self.transport.is_closing():
            return
        self.left -= 1
        if self.left:
            self.transport.write(CHUNK)
            asyncio.get_running_loop().call_soon(self.step)
        else:
            self.transport.write(LAST)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Replica, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))

"""Both sides die, dawdle and misbehave at random moments: every exchange is accounted once, and nothing is left."""

from __future__ import annotations

import asyncio
import random

import h11
import pytest

OK = b"HTTP/1.1 200 OK\r\n"


class RandomMeter:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def request_body(self, chunk: bytes) -> None: ...
    def verdict(self) -> str:
        return self.chance.choice(["wait", "wait", "pass", "pass", "retry"])

    def response_head(self, status: int, headers: object) -> str:
        return self.verdict()

    def response_body(self, chunk: bytes) -> str:
        return self.verdict()

    def response_end(self) -> str:
        return self.verdict()


@pytest.mark.parametrize("seed", range(4))
async def test_chaos(bench, handler_type, caplog, seed: int) -> None:
    chance = random.Random(seed)

    async def pause() -> None:
        await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01]))

    async def erratic(side, number: int) -> None:
        while True:
            if chance.random() < 0.1:
                return
            try:
                await (side.head() if chance.random() < 0.2 else side.request())
            except (asyncio.LimitOverrunError, h11.RemoteProtocolError):
                return  # it left the rest of an earlier body unread
            await pause()
            if chance.random() < 0.1:
                side.reset()
                return
            body = b"x" * chance.choice([0, 10, 20_000, 300_000])
            parts = [OK + b"Content-Length: %d\r\n\r\n" % len(body), body[: len(body) // 2], body[len(body) // 2 :]]
            if chance.random() < 0.5:
                chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts[1:] if part]
                parts = [OK + b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n"]
            if chance.random() < 0.1:
                parts.insert(chance.randrange(len(parts)), b"garbage\r\n\r\n")
            whole = chance.random() < 0.9
            for part in parts if whole else parts[: chance.randrange(len(parts))]:
                side.send(part)
                await pause()
            if not whole:
                return

    replicas = [(await bench.replica(erratic)).url for _ in range(3)]
    handler = handler_type(*replicas)
    handler.meter = lambda: RandomMeter(chance) if chance.random() < 0.3 else None
    listener = await bench.gate(handler, buffer_bytes=16_384, replay_bytes=50_000)

    async def user() -> None:
        client = await bench.client(listener)
        for _ in range(4):
            body = b"y" * chance.choice([0, 10, 20_000, 200_000])
            framed = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            if chance.random() < 0.4:
                framed = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            raw = b"POST / HTTP/1.1\r\nHost: gate\r\n" + framed.replace(b"0\r\n\r\n\r\n0", b"0", 1)
            cut = chance.randrange(len(raw))
            client.send(raw[:cut])
            await pause()
            if chance.random() < 0.15:
                break
            client.send(raw[cut:])
            await pause()
            if chance.random() < 0.15:
                break
            try:
                await client.reply(b"POST")
            except (h11.RemoteProtocolError, ConnectionError):
                break
        await client.close()

    async with asyncio.timeout(30):
        await asyncio.gather(*(user() for _ in range(60)))
        while listener.exchanges or listener.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    handler.check()
    assert caplog.text == ""
    assert len({outcome for outcome, _ in handler.ends}) >= 3

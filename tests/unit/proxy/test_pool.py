from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator

import pytest

from tidegate.config.tree import HttpConfig
from tidegate.proxy.pool import Pool, ReplicaPool

GET = b"GET / HTTP/1.1\r\nHost: gate\r\n\r\n"


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix", "authority"),
    [
        ("http://a", "a", 80, b"", b"a"),
        ("http://a:8000/", "a", 8000, b"", b"a:8000"),
        ("http://a:8000/base/v", "a", 8000, b"/base/v", b"a:8000"),
        ("http://[::1]:8000", "::1", 8000, b"", b"[::1]:8000"),
        ("https://a", "a", 443, b"", b"a"),
    ],
)
def test_a_replica_url_is_taken_apart(url: str, host: str, port: int, prefix: bytes, authority: bytes) -> None:
    replica = ReplicaPool(url)
    assert (replica.host, replica.port, replica.prefix) == (host, port, prefix)
    assert replica.head_prefix == b" HTTP/1.1\r\nHost: " + authority + b"\r\n"


@pytest.mark.parametrize("url", ["", "a:80", "ftp://a", "http://", "http://a/?q", "http://a#f", "http://a:x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ReplicaPool(url)


async def test_concurrent_requests_open_connections_and_reuse_them(bench, handler_type) -> None:
    replica = await bench.echo()
    listener = await bench.gate(handler_type(replica.url))
    clients = [await bench.client(listener) for _ in range(8)]
    for _ in range(3):
        for client in clients:
            client.send(GET)
        for client in clients:
            assert (await client.reply()).status == 200
    assert replica.connections <= 8
    assert listener.pool.opened == replica.connections
    assert listener.pool.opened + listener.pool.reused == 24
    assert listener.pool.idle_connections == listener.pool.open_connections == replica.connections


async def test_a_forgotten_replica_keeps_its_exchange_and_no_connection(bench, handler_type) -> None:
    answer = asyncio.Event()

    async def script(side, number: int) -> None:
        await side.request()
        if number:
            await answer.wait()
        side.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await side.gone()

    replica = await bench.replica(script)
    handler = handler_type(replica.url)
    listener = await bench.gate(handler)
    first, second = await bench.client(listener), await bench.client(listener)
    first.send(GET)
    await first.reply()
    replica_pool = listener.pool.replica(replica.url)
    listener.pool.take(replica_pool)  # so that the second request opens its own
    second.send(GET)
    await handler.until(lambda: len(handler.opened_ids) == 2)
    await asyncio.sleep(0.1)
    listener.pool.forget(replica.url)
    answer.set()
    assert (await second.reply()).body == b"ok"
    assert replica_pool.idle == []
    for connection in list(replica_pool.connections):
        connection.abort()


async def test_a_peer_whose_host_vanishes_is_noticed_on_both_sides(bench, handler_type) -> None:
    """Silence is normal for hours, so the kernel has to ask whether the other end is still there."""
    replica = await bench.echo()
    listener = await bench.gate(handler_type(replica.url))
    client = await bench.client(listener)
    client.send(GET)
    assert (await client.reply()).status == 200
    (server_side,) = listener._connections
    (upstream,) = listener.pool.replica(replica.url).connections
    for connection in (server_side, upstream):
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60


async def test_an_idle_connection_past_its_time_is_not_used(bench) -> None:
    pool = Pool(HttpConfig(upstream_keep_alive_s=1))
    replica = pool.replica((await bench.replica(lambda side, number: side.gone())).url)
    old, new = await pool.connect(replica), await pool.connect(replica)
    replica.idle[:] = [old, new]
    old.idle_since_s, new.idle_since_s = pool.now_s, pool.now_s + 5
    pool.now_s += 2
    assert pool.take(replica) is new
    assert pool.take(replica) is None
    assert old.closed
    new.abort()
    await asyncio.sleep(0.05)
    assert pool.open_connections == 0


async def test_replicas_over_ipv6(bench, handler_type) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        writer.close()

    try:
        server = await asyncio.start_server(answer, "::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    handler = handler_type(f"http://[::1]:{server.sockets[0].getsockname()[1]}")
    client = await bench.client(await bench.gate(handler))
    client.send(GET)
    assert (await client.reply()).body == b"ok"
    server.close()


async def test_a_connection_given_up_while_it_is_made_is_closed(bench) -> None:
    pool = Pool(HttpConfig())
    replica = pool.replica((await bench.replica(lambda side, number: side.gone())).url)
    for turns in range(12):  # at whatever turn of the loop the caller leaves
        task = asyncio.create_task(pool.connect(replica))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            (await task).abort()
    await asyncio.sleep(0.05)
    assert pool.open_connections == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
async def test_replicas_over_tls(bench, handler_type, tmp_path, monkeypatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for trusted in (False, True):
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        client = await bench.client(await bench.gate(handler_type(url)))
        client.send(GET)
        assert (await client.reply()).status == (200 if trusted else 502)
    server.close()


@pytest.fixture
def no_file_left() -> Iterator[Callable[[bool], None]]:
    """Switches it on and off for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def switch(on: bool) -> None:
        limit = soft
        if on:
            limit = os.dup(0)  # the lowest number that is free
            os.close(limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

    yield switch
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_connection_that_no_file_is_left_for_waits_and_is_nobodys_failure(
    bench, handler_type, no_file_left: Callable[[bool], None]
) -> None:
    handler = handler_type((await bench.echo()).url)
    listener = await bench.gate(handler)
    client = await bench.client(listener)
    no_file_left(True)
    client.send(GET)
    async with asyncio.timeout(10):
        while listener.pool.starved < 3:  # noqa: ASYNC110 - the pool tells nobody
            await asyncio.sleep(0.01)
    no_file_left(False)
    assert (await client.reply()).status == 200
    assert handler.returns == []
    assert listener.pool.failed == 0


async def test_a_client_that_leaves_ends_the_wait_for_a_file(
    bench, handler_type, no_file_left: Callable[[bool], None]
) -> None:
    handler = handler_type((await bench.echo()).url)
    listener = await bench.gate(handler)
    client = await bench.client(listener)
    no_file_left(True)
    client.send(GET)
    await handler.until(lambda: handler.opened_ids)
    await client.close()
    await handler.until(lambda: handler.ends)
    no_file_left(False)
    assert handler.ends == [("aborted", None)]

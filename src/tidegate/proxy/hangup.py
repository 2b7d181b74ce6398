"""Sees a client leave while its connection is not being read.

A paused transport is not polled, so a client that leaves during back-pressure, with unread bytes in the socket, would
go unnoticed until the replica has taken the whole body. An epoll instance of our own watches such sockets for the
peer's hang-up alone (EPOLLRDHUP), and the event loop watches that epoll. Where there is no epoll, the client's leaving
is found at the next read.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.proxy.http1_server import ClientConnection


class HangupWatch:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._by_descriptor: dict[int, ClientConnection] = {}
        self._descriptors: dict[ClientConnection, int] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            loop.add_reader(self._epoll.fileno(), self._collect)

    @property
    def watching(self) -> int:
        return len(self._descriptors)

    def watch(self, connection: ClientConnection) -> None:
        if self._epoll is None:
            return
        descriptor: int = connection.transport.get_extra_info("socket").fileno()
        if descriptor >= 0:
            self._by_descriptor[descriptor] = connection
            self._descriptors[connection] = descriptor
            self._epoll.register(descriptor, select.EPOLLRDHUP)

    def forget(self, connection: ClientConnection) -> None:
        """To be called before the socket is closed: its number may be used again at once."""
        descriptor = self._descriptors.pop(connection, None)
        if descriptor is not None and self._epoll is not None:
            del self._by_descriptor[descriptor]
            with contextlib.suppress(OSError):
                self._epoll.unregister(descriptor)

    def _collect(self) -> None:
        assert self._epoll is not None
        for descriptor, _ in self._epoll.poll(0):
            connection = self._by_descriptor.get(descriptor)
            if connection is not None:
                self.forget(connection)
                connection.hung_up()

    def close(self) -> None:
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

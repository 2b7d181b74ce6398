"""Notices a peer whose host is gone: no FIN, no RST, nothing.

A held request, or a generation of an hour, sends nothing in either direction, so that TCP alone would never find out:
the session would keep its room for good. Probes by the kernel cost nothing while bytes flow. They are about 60 s late.
"""

from __future__ import annotations

import asyncio
import socket

IDLE_S = 30  # until the first probe; above it, a silent connection costs a packet in each direction every IDLE_S
INTERVAL_S = 10
PROBES = 3


def probe_when_silent(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", INTERVAL_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

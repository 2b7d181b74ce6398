"""What fails for want of open files is this process's own limit."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from tidegate import open_files
from tidegate.open_files import FILES_PER_REPLICA, SPARE_FILES, ensure_open_files, out_of_files


@pytest.fixture
def no_file_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_numbers_of_our_own_limits_are_told_from_those_of_a_peer() -> None:
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
        assert out_of_files(OSError(number, ""))
    for number in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ECONNRESET, errno.EADDRNOTAVAIL):
        assert not out_of_files(OSError(number, ""))
    assert not out_of_files(OSError("Multiple exceptions"))


def test_a_name_that_cannot_be_looked_up_may_be_our_own_limit_too(no_file_left: None) -> None:
    assert out_of_files(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))


def test_a_name_that_is_not_known_is_not_our_own_limit() -> None:
    assert not out_of_files(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))


@pytest.mark.parametrize(
    ("soft", "hard", "asked", "replicas", "fit"),
    [(1024, 4096, 300, 2, 300), (1024, 1024, 16_384, 0, 384), (1024, 1024, 16_384, 64, 192), (64, 64, 10, 1, 1)],
)
def test_as_many_connections_are_served_as_files_allow(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, asked: int, replicas: int, fit: int
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda which, limits: set_to.append(limits))
    assert ensure_open_files(asked, replicas) == fit
    needed = 2 * fit + SPARE_FILES + FILES_PER_REPLICA * replicas
    assert fit == 1 or needed <= (set_to or [(soft, hard)])[-1][0]

"""Worker URLs: parsed, made canonical, and checked. A replica is its URL: listing it again is the same replica.

10.0.0.7:8000            -> http://10.0.0.7:8000
HTTP://Host:80/          -> http://host
https://[2001:DB8::1]/v  -> https://[2001:db8::1]/v
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

from tidegate.errors import RequestError
from tidegate.types import ReplicaId

T = TypeVar("T")

_DEFAULT_PORTS = {"http": 80, "https": 443}
_HAS_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?")
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\uffff\\]")
_CREDENTIALS = re.compile(r"//[^/]*@")
_MAX_URL_BYTES = 2048


class InvalidWorkerUrl(RequestError):
    reason = "invalid_worker_url"


class DuplicateWorkerUrl(RequestError):
    reason = "duplicate_worker_url"


def normalise(url: str) -> ReplicaId:
    """The canonical form; InvalidWorkerUrl when it cannot be a replica's base URL."""
    text = url.strip()
    if not text or len(text) > _MAX_URL_BYTES:
        raise _invalid(url, "it is empty" if not text else "it is too long")
    if _UNSAFE.search(text):
        raise _invalid(url, "it has spaces, control characters or non-ASCII characters")
    try:
        parts = urlsplit(text if _HAS_SCHEME.match(text) else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _invalid(url, str(error)) from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise _invalid(url, f"the scheme is {parts.scheme}, not http or https")
    if not host:
        raise _invalid(url, "it has no host")
    if parts.username is not None or parts.query or parts.fragment:
        raise _invalid(url, "it has credentials, a query or a fragment")
    if port == 0:
        raise _invalid(url, "port 0 cannot be reached")
    netloc = _canonical_host(url, host)
    if port is not None and port != _DEFAULT_PORTS[parts.scheme]:
        netloc = f"{netloc}:{port}"
    return f"{parts.scheme}://{netloc}{parts.path.rstrip('/')}"


def normalise_all(urls: Iterable[str]) -> list[ReplicaId]:
    """In their order. DuplicateWorkerUrl names the first that stands twice, once canonical."""
    seen: dict[ReplicaId, str] = {}
    for url in urls:
        replica = normalise(url)
        if replica in seen:
            raise DuplicateWorkerUrl(f"worker URL {url!r} stands twice (as {seen[replica]!r} before)", param="url")
        seen[replica] = url
    return list(seen)


def by_replica(table: Mapping[str, T]) -> dict[ReplicaId, T]:
    """A table of settings by URL, however its URLs are spelled."""
    return {normalise(url): value for url, value in table.items()}


def host_of(replica: ReplicaId) -> str:
    """The host as sockets take it: an IPv6 address without brackets."""
    return urlsplit(replica).hostname or ""


def _canonical_host(url: str, host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if ":" in host or not _HOST_NAME.fullmatch(host):
            raise _invalid(url, f"{host!r} is not a host") from None
        return host.lower()
    return f"[{address}]" if address.version == 6 else str(address)


def _invalid(url: str, why: str) -> InvalidWorkerUrl:
    shown = _CREDENTIALS.sub("//***@", url[:200])
    return InvalidWorkerUrl(f"worker URL {shown!r} is not usable: {why}", param="url")

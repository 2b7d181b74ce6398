"""Who is this? Session, workload class and group of a request, from its headers first and from its body last.

Session, in this order; the first non-empty one wins:
  headers   `identity.session_headers`, then SESSION_HEADERS; a name sent with _ for - is the same header
  body      session_id, session_params.session_id, session_params.id, vllm_xargs.session_id,
            vllm_xargs.agentic_context (its session_id or program_id, or the text itself), program_id,
            metadata.session_id, and `user` if `identity.user_is_session`
  else      None: a session of this one request
x-request-id is never looked at: it differs from turn to turn.

Class: X-Workload-Class, else workload_class in sampling_params.extra_args, vllm_xargs, metadata. Group: X-Group-ID,
else group_id in the same places. Body keys count only for requests whose body was read, which are those on an
inference path without a session header: with one, the body is relayed unread.

Only the INFERENCE_PATHS cost KV; everything else is relayed without admission.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from tidegate.errors import InvalidBody, InvalidSession
from tidegate.proxy.seam import RequestHead

INFERENCE_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
        "/generate",
    }
)

SESSION_HEADERS = (
    b"x-session-id",
    b"x-smg-routing-key",
    b"x-dynamo-session-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"thread-id",
    b"x-correlation-id",
)
CLASS_HEADER = b"x-workload-class"
GROUP_HEADER = b"x-group-id"
FINAL_HEADER = b"x-dynamo-session-final"

MAX_LABEL_BYTES: Final = 256  # of a session id, class or group: they are dictionary keys that live as long as a session
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")


class Identity(msgspec.Struct, frozen=True):
    session: str | None
    workload: str | None
    group: str | None
    final: bool = False  # the client says that this is the session's last request
    encoded: bool = False  # its body is compressed: not ours to decode
    in_own_header: bool = False  # X-Session-ID says it, which engines read too


class IdentityBody(msgspec.Struct):
    """The few keys of a body that may say who it is; the decoder skips all others, the prompt among them."""

    session_id: Any = None
    session_params: Any = None
    vllm_xargs: Any = None
    program_id: Any = None
    metadata: Any = None
    sampling_params: Any = None
    user: Any = None


_body_decoder = msgspec.json.Decoder(IdentityBody)


# What a header's name means; session headers have their rank, 0 first.
_IGNORED: Final = -1
_CLASS: Final = 1000
_GROUP: Final = 1001
_FINAL: Final = 1002
_ENCODED: Final = 1003
_ROLES = {CLASS_HEADER: _CLASS, GROUP_HEADER: _GROUP, FINAL_HEADER: _FINAL, b"content-encoding": _ENCODED}
_MAX_NAMES: Final = 4096  # of header names remembered as they were spelled; clients spell a few dozen


class Identifier:
    def __init__(
        self, *, session_headers: tuple[str, ...] = (), read_bodies: bool = True, user_is_session: bool = False
    ) -> None:
        extra = (name.lower().replace("_", "-").encode("latin-1") for name in session_headers)
        ranked = dict.fromkeys((*(name for name in extra if name != b"x-request-id"), *SESSION_HEADERS))
        self._canonical = {**_ROLES, **{name: rank for rank, name in enumerate(ranked)}}
        self._own_rank = self._canonical[SESSION_HEADERS[0]]
        self._roles: dict[bytes, int] = {}  # by name as spelled: header names are looked up a million times
        self._read_bodies = read_bodies
        self._user_is_session = user_is_session

    def wants_body(self, head: RequestHead) -> bool:
        """Whether only the body can tell the session of this inference request. Keeps what the headers say."""
        identity = self.of_headers(head)
        head.tag = identity
        return identity.session is None and self._read_bodies and not identity.encoded

    def identify(self, head: RequestHead, body: bytes | None) -> Identity:
        """Raises InvalidSession, and InvalidBody if the body had to be read and is not a JSON object."""
        identity = head.tag if isinstance(head.tag, Identity) else self.of_headers(head)
        if identity.session is None and body is not None and self._read_bodies and not identity.encoded:
            known = decode_body(head, body)
            if known is not None:
                identity = Identity(
                    self._body_session(known),
                    identity.workload or _body_label(known, "workload_class"),
                    identity.group or _body_label(known, "group_id"),
                    identity.final,
                )
        if identity.session is not None:
            check_label("session id", identity.session)
        if identity.workload is not None:
            check_label("workload class", identity.workload)
        if identity.group is not None:
            check_label("group id", identity.group)
        return identity

    def header_session(self, head: RequestHead) -> str | None:
        return self.of_headers(head).session

    def of_headers(self, head: RequestHead) -> Identity:
        session = workload = group = None
        final = encoded = False
        rank = _CLASS
        roles = self._roles
        for name, value in head.headers:
            role = roles.get(name)
            if role is None:
                role = self._role(name)
            if role < 0:
                continue
            if role < rank:
                text = _text(value)
                if text:
                    session, rank = text, role
            elif role == _CLASS:
                workload = workload or _text(value) or None
            elif role == _GROUP:
                group = group or _text(value) or None
            elif role == _FINAL:
                final = value.strip().lower() in (b"true", b"1")
            elif role == _ENCODED:
                encoded = True
        return Identity(session, workload, group, final, encoded, rank == self._own_rank)

    def _role(self, name: bytes) -> int:
        role = self._canonical.get(name.lower().replace(b"_", b"-"), _IGNORED)
        if len(self._roles) < _MAX_NAMES:
            self._roles[name] = role
        return role

    def _body_session(self, body: IdentityBody) -> str | None:
        params, xargs, metadata = _table(body.session_params), _table(body.vllm_xargs), _table(body.metadata)
        context = xargs.get("agentic_context")
        if isinstance(context, dict):
            context = context.get("session_id") or context.get("program_id")
        return (
            _label(body.session_id)
            or _label(params.get("session_id"))
            or _label(params.get("id"))
            or _label(xargs.get("session_id"))
            or _label(context)
            or _label(body.program_id)
            or _label(metadata.get("session_id"))
            or (_label(body.user) if self._user_is_session else None)
        )


def decode_body(head: RequestHead, body: bytes) -> IdentityBody | None:
    """None: the body does not claim to be JSON and is not, so the replica shall judge it."""
    try:
        return _body_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        media_type = (head.get(b"content-type") or b"application/json").partition(b";")[0].strip().lower()
        if media_type.endswith(b"json"):
            raise InvalidBody(f"the body had to be read for a session id and is not a JSON object: {exc}") from exc
        return None


def check_label(what: str, value: str) -> None:
    if value.isascii() and len(value) <= MAX_LABEL_BYTES and value.isprintable():
        return
    if len(value.encode()) > MAX_LABEL_BYTES:
        raise InvalidSession(f"{what} is longer than {MAX_LABEL_BYTES} bytes", reason=_invalid(what))
    if _CONTROL.search(value):
        raise InvalidSession(f"{what} has control characters", reason=_invalid(what))


def _invalid(what: str) -> str:
    return "invalid_" + what.replace(" ", "_")


def _text(value: bytes) -> str:
    """UTF-8 where it is, so that a header names the same session as the JSON of a finish call; else byte by byte."""
    try:
        return value.strip(b" \t").decode()
    except UnicodeDecodeError:
        return value.strip(b" \t").decode("latin-1")


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _label(value: Any) -> str | None:
    """Ids are text; some clients number theirs."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return None


def _body_label(body: IdentityBody, key: str) -> str | None:
    extra = _table(_table(body.sampling_params).get("extra_args"))
    for place in (extra, _table(body.vllm_xargs), _table(body.metadata)):
        label = _label(place.get(key))
        if label is not None:
            return label
    return None

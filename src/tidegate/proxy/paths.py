"""One path, however it is spelled: requests are recognised by it, and go on as they came.

RFC 3986, 6.2.2 makes `/v1/%63ompletions` and `/v1/./completions` equal to `/v1/completions`. Engines go further: their
servers decode `%2F` too before they route, and redirect a path that ends with a slash to the one that does not. What an
engine may take for a request on a known path must be taken for it here, or it would pass without admission; what it
then refuses after all costs nothing.
"""

from __future__ import annotations

from urllib.parse import unquote


def normalised(path: str) -> str:
    """Decoded once; without empty, `.` and `..` segments, and without a slash at its end."""
    segments: list[str] = []
    for segment in unquote(path, encoding="latin-1").split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    return "/" + "/".join(segments)

"""Small requests to an engine: JSON in, JSON or text out, with the key where one is needed."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from types import MappingProxyType
from typing import Any


class Refused(Exception):
    """The server answered with an error status, or not at all. `status` is None when there was no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


# Loopback traffic must never go through a proxy that the environment names.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(
    url: str,
    body: dict[str, Any] | None = None,
    *,
    timeout: float = 5.0,
    key: str | None = None,
    post: bool = False,
    headers: Mapping[str, str] = MappingProxyType({}),
    ca_file: str | None = None,
) -> str:
    """GET `url`, or POST `body` as JSON (an empty POST with `post`), each time on a new connection. Returns the text; raises
    `Refused`."""
    data = json.dumps(body).encode() if body is not None else (b"" if post else None)
    key_header = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **key_header, **headers})
    try:
        with (_trusting(ca_file) if ca_file else _OPENER).open(request, timeout=timeout) as answer:
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        with error:
            detail = error.read(500).decode(errors="replace").strip()
        raise Refused(f"{url} answered {error.code}: {detail}", error.code) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Refused(f"{url} did not answer: {reason}") from error


def call_json(url: str, body: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """As `call`, with the answer read as a JSON object."""
    try:
        answer = json.loads(call(url, body, **options))
    except ValueError as error:
        raise Refused(f"{url} did not answer with JSON") from error
    if not isinstance(answer, dict):
        raise Refused(f"{url} did not answer with a JSON object")
    return answer


def _trusting(ca_file: str) -> urllib.request.OpenerDirector:
    handler = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file))
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), handler)

"""What every request passes: limits of size, foreign pages kept out, headers, counting."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hypic_rag.server.errors import ApiError, as_api_error

__all__ = ["Gate"]

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Gate:
    """Lets requests in that are small enough and don't come from another site's page.

    Args:
        app: what's behind it.
        hosts: names that the Host header may have; None allows all.
        limits: largest body by path, with the one for all others under ``""``.
        count: told the route and the status of every request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: tuple[str, ...] | None,
        limits: Mapping[str, int],
        count: Callable[[str, int], None],
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._limits = limits
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # the client went away
        started = False
        headers = {**_HEADERS, "X-Request-Id": uuid.uuid4().hex}

        async def sending(message: Message) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started = True
                status = message["status"]
                MutableHeaders(scope=message).update(headers)
            await send(message)

        try:
            self._check(Headers(scope=scope))
            limit = self._limits.get(scope["path"], self._limits[""])
            await self._app(scope, _limited(scope, receive, limit), sending)
        except Exception as error:
            if started:
                raise
            await _refuse(as_api_error(error), sending)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._count(route, status)

    def _check(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if self._hosts is not None and name.lower() not in self._hosts:
            raise ApiError(
                403,
                f"This server doesn't go by the name {name!r}: without API keys it only answers "
                f"to {', '.join(self._hosts)}.",
                "unknown_host",
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise ApiError(403, "Pages of other sites can't use this server.", "foreign_origin")


def _limited(scope: Scope, receive: Receive, limit: int) -> Receive:
    """``receive``, with an end to it where the body gets too large."""
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    seen = 0

    async def receiving() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _too_large(limit)
        return message

    return receiving


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The request is larger than {limit / 1e6:.1f} MB, the limit here.", "too_large"
    )


async def _refuse(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

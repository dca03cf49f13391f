"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import logging
from typing import Any

from hypic_rag.errors import (
    ConfigError,
    ContextLengthError,
    DocumentError,
    EmptyStoreError,
    HypicError,
    RequestError,
    StoreAccessError,
)

__all__ = ["ApiError", "as_api_error"]

_log = logging.getLogger(__name__)

_STATUSES: tuple[tuple[type[HypicError], int, str], ...] = (
    (EmptyStoreError, 400, "empty_store"),
    (ContextLengthError, 400, "context_length_exceeded"),
    (RequestError, 400, "invalid_request"),
    (ConfigError, 400, "invalid_value"),
    (DocumentError, 422, "unreadable_document"),
    (StoreAccessError, 503, "store_unavailable"),
)


class ApiError(Exception):
    """A request that ends with an error.

    Attributes:
        status: HTTP status.
        message: for people.
        code: for programs.
        param: which parameter is wrong, if it's one.
        retry_after: seconds after which another try is worth it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": kinds.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: BaseException) -> ApiError:
    """Any error as one to answer with; what nobody foresaw is logged and not told."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            return ApiError(status, str(error), code)
    _log.error("A request failed: %s", error, exc_info=error)
    return ApiError(500, "The server failed; its log says more.", "internal_error")

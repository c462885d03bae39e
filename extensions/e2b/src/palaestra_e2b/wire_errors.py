"""The errors that this server sends, in the two forms that the SDKs read.

The control API and the file endpoints send `{"code": HTTP_STATUS, "message": TEXT}`; the services of a sandbox send
Connect errors, `{"code": "not_found", "message": TEXT}`. The SDKs turn both into their own exceptions.
"""

from __future__ import annotations

import errno

from palaestra_slots.core.errors import AcquireTimeout, ConfigError, PalaestraError, SlotLost, StaleLease

NOT_FOUND_TEXT = "was not found"
"""The SDK reads from these words in a 502 that the sandbox does not run; without them, it reports a network problem."""

_STATUS_OF_CODE = {
    "canceled": 499, "unknown": 500, "invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404,
    "already_exists": 409, "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400,
    "aborted": 409, "out_of_range": 400, "unimplemented": 501, "internal": 500, "unavailable": 503,
    "data_loss": 500, "unauthenticated": 401,
}  # fmt: skip
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


FULL = (
    "this server has no place for another sandbox: kill one, or start the server with more (palaestra serve e2b "
    "--sandboxes)"
)
"""In place of the pool's error, which names the sandboxes of all keys."""


class ApiError(Exception):
    """An answer of the control API or of a file endpoint that is not a success. `retry` False keeps the SDK from
    sending the request again."""

    def __init__(self, status: int, message: str, *, retry: bool | None = None) -> None:
        super().__init__(message)
        self.status, self.retry = status, retry


class NotRunning(ApiError):
    """A call into a sandbox that does not run, or that has ended during the call. A sandbox that `remains` can be
    resumed."""

    def __init__(self, sandbox_id: str, why: str, *, remains: bool = False) -> None:
        super().__init__(502, f"the sandbox {sandbox_id} {NOT_FOUND_TEXT}: {why}")
        self._problem = "stopped" if remains else "was killed or reached its end of life"
        self._problem += f": {why}"

    def in_stream(self) -> RpcError:
        """Return the error that ends a stream. Without the words of `NOT_FOUND_TEXT`, the SDKs ask for the sandbox's
        health, and report that it ended during the call."""
        return RpcError("unavailable", f"the sandbox {self._problem}")


class RpcError(Exception):
    """A Connect error of a service in a sandbox. `code` is Connect's name of the error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def status(self) -> int:
        """The HTTP status of the answer to a unary call."""
        return _STATUS_OF_CODE[self.code]

    @property
    def body(self) -> dict[str, str]:
        """The error as Connect writes it."""
        return {"code": self.code, "message": str(self)}


def rpc_error(error: Exception, sandbox_id: str) -> RpcError | ApiError:
    """Return the error to send for a failure in a sandbox."""
    match error:
        case RpcError() | ApiError():
            return error
        case SlotLost() | StaleLease():
            return NotRunning(sandbox_id, str(error))
        case AcquireTimeout():
            return ApiError(503, FULL, retry=False)
        case TimeoutError():
            return RpcError("deadline_exceeded", "the request did not arrive in time")
        case FileNotFoundError() | ProcessLookupError():
            return RpcError("not_found", _error_text(error))
        case FileExistsError():
            return RpcError("already_exists", _error_text(error))
        case PermissionError():
            return RpcError("permission_denied", _error_text(error))
        case OSError() if error.errno in _NO_SPACE:
            return RpcError("resource_exhausted", f"not enough disk space: {_error_text(error)}")
        case OSError() if not isinstance(error, PalaestraError):
            return RpcError("invalid_argument", _error_text(error))
        case ConfigError() | ValueError():
            return RpcError("invalid_argument", str(error))
        case PalaestraError():
            return RpcError("internal", str(error))
    raise error


def api_error(error: Exception, sandbox_id: str) -> ApiError:
    """Return the error to send for a failure of a file endpoint or of the control API."""
    found = rpc_error(error, sandbox_id)
    if isinstance(found, ApiError):
        return found
    return ApiError(507 if isinstance(error, OSError) and error.errno in _NO_SPACE else found.status, str(found))


def not_found(sandbox_id: str, why: str = "no such sandbox") -> ApiError:
    """Return the control API's error for a sandbox that does not exist, or that belongs to another key."""
    return ApiError(404, f"the sandbox {sandbox_id} {NOT_FOUND_TEXT}: {why}")


def _error_text(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"

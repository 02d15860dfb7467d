"""The errors of requests. The package's docstring shows the tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import msgspec
from kubernetes.aio.config import ConfigException

from keepstep.errors import KeepstepError


class KubeError(KeepstepError):
    """The API server refused a request, or did not answer. `status`: the HTTP status; 0 without an
    answer."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFound(KubeError):
    """404: the object, or the kind, does not exist."""


class Conflict(KubeError):
    """409: it was written meanwhile, or it exists already. Read again and decide again."""


class Denied(KubeError):
    """401 or 403: the service account lacks a rule, or the token is not accepted."""


class Rejected(KubeError):
    """The request is wrong. Trying again does not help."""


class Unavailable(KubeError):
    """No answer, or an answer that says to try again later."""


def error_of(status: int, message: str, reason: str = "") -> KubeError:
    """The exception for an HTTP status."""
    kinds = {
        401: Denied,
        403: Denied,
        404: NotFound,
        409: Conflict,
        410: Unavailable,
        429: Unavailable,
    }
    kind = kinds.get(status, Unavailable if status >= 500 else Rejected)
    return kind(message, status=status, reason=reason)


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Raises network errors and malformed answers as KubeError."""
    try:
        yield
    except TimeoutError as error:
        raise Unavailable("the API server did not answer in time") from error
    except (aiohttp.ClientError, ConfigException, OSError) as error:
        raise Unavailable(f"the API server cannot be reached: {error}") from error
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable(f"the API server answered nonsense: {error!r}") from error

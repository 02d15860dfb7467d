"""What can go wrong with a request; the tree is drawn in the package's docstring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import msgspec
from kubernetes.aio.config import ConfigException

from keepstep.errors import KeepstepError


class KubeError(KeepstepError):
    """The API server said no, or nothing. `status`: HTTP's, 0 when there was no answer.
    `retry_after_s`: how long it wants to be left alone."""

    def __init__(
        self, message: str, *, status: int = 0, reason: str = "", retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class NotFound(KubeError):
    """404: the object, or the kind, is not there."""


class Conflict(KubeError):
    """409: somebody wrote meanwhile, or it exists already; read again, decide again."""


class Denied(KubeError):
    """401 or 403: the service account lacks a rule, or the token is not accepted."""


class Rejected(KubeError):
    """The request is wrong; trying again will not help."""


class Unavailable(KubeError):
    """No answer, or one that says try again later."""


def error_of(
    status: int, message: str, reason: str = "", *, retry_after_s: float = 0.0
) -> KubeError:
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
    return kind(message, status=status, reason=reason, retry_after_s=retry_after_s)


@contextmanager
def mapped_errors() -> Iterator[None]:
    """What the network says, as KubeError."""
    try:
        yield
    except TimeoutError as error:
        raise Unavailable("the API server did not answer in time") from error
    except (aiohttp.ClientError, ConfigException, OSError) as error:
        raise Unavailable(f"the API server cannot be reached: {error}") from error
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable(f"the API server answered nonsense: {error!r}") from error

"""Every error that keepstep raises, in one tree.

    KeepstepError
      UsageError            the caller did something that cannot work; says what to do instead
        WithinStepError     the state is that of no step now; a save after the step can keep it
      ImageError            bytes are not the image they claim to be
        FormatError         malformed or hostile header, extras or control page
        TornError           no valid seal: the image was never completed
        DigestError         sealed, but some bytes differ from their digest
        ForeignError        a valid image of another run, rank, world or step
        VersionError        written by a newer keepstep; left alone, never quarantined
      StorageError          a volume failed; the file was quarantined, nothing is retried
        NoSpaceError        the volume is full, or the capacity limit is reached
      SidecarError          the sidecar answered with an error
        SidecarAbsent       no sidecar listens on the socket, or it does not answer
        ProtocolError       the peer speaks another protocol version, or its message is malformed
        NoMemoryError       the memory limit does not allow two slots of this image
      SlotUnavailable       no slot is at hand, so this step is not kept; the next may be
      RestoreError          something was found, but it cannot be restored
        MismatchError       model and checkpoint disagree: lists names, shapes, dtypes
        CoverageError       the images of a step do not cover its tensors exactly: names each box
        WorldChangedError   the step was saved by another world size
        NothingCommonError  every rank found steps, but no step is held by all
      NotDurableError       `wait` or `close`: a step did not become durable in time

Training code gets these errors only from `restore`, `wait`, `close`, or with `strict=True`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class KeepstepError(Exception):
    """Base class of all errors that keepstep raises."""


class UsageError(KeepstepError):
    """The caller did something that cannot work; the message says what to do instead."""


class WithinStepError(UsageError):
    """The state is that of no step at the moment, as within the accumulation of gradients."""


class ImageError(KeepstepError):
    """Bytes are not the image they claim to be. `path` names the file, if there is one."""

    def __init__(self, message: str, *, path: Path | str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path is not None else message)
        self.reason = message
        self.path = path


class FormatError(ImageError):
    """Malformed or hostile header, extras or control page."""


class TornError(ImageError):
    """No valid seal: the image was never completed."""


class DigestError(ImageError):
    """The image is sealed, but the bytes of `chunk` differ from their digest. `tensors`: names of
    the tensors in this chunk."""

    def __init__(
        self,
        message: str,
        *,
        chunk: int | None = None,
        tensors: tuple[str, ...] = (),
        path: Path | str | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.chunk = chunk
        self.tensors = tensors


class ForeignError(ImageError):
    """A valid image of another run, rank, world or step."""


class VersionError(ImageError):
    """The image was written by a newer keepstep. It is left alone, never quarantined."""


class StorageError(KeepstepError):
    """A volume failed. The file in question was quarantined; nothing is retried."""


class NoSpaceError(StorageError):
    """The volume is full, or its capacity limit is reached."""


class SidecarError(KeepstepError):
    """The sidecar answered with an error; `code` is the machine-readable kind."""

    def __init__(self, message: str, *, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class SidecarAbsent(SidecarError):
    """No sidecar listens on the socket, or it does not answer."""


class ProtocolError(SidecarError):
    """The peer speaks another protocol version, or its message is malformed."""


class NoMemoryError(SidecarError):
    """The memory limit does not allow two slots of this image."""


class SlotUnavailable(KeepstepError):
    """No slot is at hand, so this step is not kept; the next may be."""


class RestoreError(KeepstepError):
    """Something was found, but it cannot be restored."""


class MismatchError(RestoreError):
    """Model and checkpoint disagree; the message lists names, shapes and dtypes."""


class CoverageError(RestoreError):
    """The images of a step do not cover its tensors exactly: boxes are missing, overlap, or
    contradict each other. The message lists them, and the files that would hold them."""


class WorldChangedError(RestoreError):
    """The step was saved by another world size."""


class NothingCommonError(RestoreError):
    """Every rank found steps, but no step is held by all."""


class NotDurableError(KeepstepError):
    """A step did not become durable in time."""


def few(names: Sequence[str], most: int, *, by: str = ", ", rest: str = " and ") -> str:
    """Text for a message: the first `most` of these names, and how many more there are."""
    more = f"{rest}{len(names) - most} more" if len(names) > most else ""
    return by.join(names[:most]) + more

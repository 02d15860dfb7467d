"""An archive in an object store: S3, Google Cloud Storage or Azure, through `obstore`.

`obstore` retries requests for a while (5xx, SlowDown, dropped connections), with backoff and
jitter. What still fails becomes a StorageError and is tried again later. Payloads are signed, so S3
itself refuses bytes that changed on the way.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from keepstep.errors import StorageError, UsageError
from keepstep_sidecar.concurrency import run_blocking
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.log import warn
from keepstep_sidecar.tiers.archive.store import StoredObject

_LIST_PAGE = 1000
_RETRY: Any = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=5),
        "base": 2,
    },
}
_CONNECT, _REQUEST = timedelta(seconds=5), timedelta(seconds=120)
_DENIED = re.compile(
    r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|403 Forbidden"
)
_TRIES = re.compile(r" in [\d.]+\w+(, after \d+ retries, max_retries: \d+, retry_timeout: \S+)? +")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)


def open_objects(config: ArchiveConfig) -> ObjectsStore:
    """Sends no request yet. Raises UsageError for a bucket that cannot be addressed."""
    try:
        return ObjectsStore(
            lambda: _open(config), f"{config.scheme}://{config.bucket}", config.prefix
        )
    except exceptions.BaseError as error:
        raise UsageError(f"--archive {config.url}: {_words(error)}") from error


def _open(config: ArchiveConfig) -> ObjectStore:
    """A client for the whole bucket. Prefixes are added here, so that errors show whole names."""
    client: Any = {"connect_timeout": _CONNECT, "timeout": _REQUEST}
    common: Any = {"client_options": client, "retry_config": _RETRY}
    if config.scheme == "gs":
        return GCSStore(config.bucket, **common)
    if config.scheme == "az":
        return AzureStore(config.bucket, **common)
    if config.endpoint is not None:
        client["allow_http"] = urlsplit(config.endpoint).scheme == "http"
        common["endpoint"] = config.endpoint
    if config.region is not None:
        common["region"] = config.region
    return S3Store(config.bucket, **common)


class ObjectsStore:
    """Implements `Store`. `connect`: makes a client for the whole bucket."""

    def __init__(self, connect: Callable[[], ObjectStore], bucket: str, prefix: str) -> None:
        self.where = f"{bucket}/{prefix}".rstrip("/")
        self._connect = connect
        self._store = connect()
        self._begin = f"{prefix}/" if prefix else ""

    async def list_below(self, prefix: str) -> list[StoredObject]:
        found: list[StoredObject] = []
        with self._translated(prefix):
            async for page in obstore.list(
                self._store, self._begin + prefix, chunk_size=_LIST_PAGE
            ):
                found += map(self._stored, page)
        return sorted(found, key=lambda entry: entry.name)

    def _stored(self, meta: Any) -> StoredObject:
        return StoredObject(
            name=meta["path"].removeprefix(self._begin),
            bytes=meta["size"],
            modified_at=meta["last_modified"].timestamp(),
            etag=meta["e_tag"] or str(meta["last_modified"]),
        )

    async def directories(self, prefix: str) -> list[str]:
        with self._translated(prefix):
            asked = (self._begin + prefix).rstrip("/")
            found = await obstore.list_with_delimiter_async(self._store, asked or None)
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"])

    async def find_object(self, name: str) -> StoredObject | None:
        with self._translated(name):
            try:
                return self._stored(await obstore.head_async(self._store, self._begin + name))
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise
                return None

    async def read_range(self, name: str, begin: int, view: memoryview) -> None:
        if not view:
            return
        with self._translated(name):
            data = await obstore.get_range_async(
                self._store, self._begin + name, start=begin, length=len(view)
            )
        if len(data) != len(view):
            raise StorageError(
                f"{self.where}/{name}: {len(data)} bytes instead of {len(view)} from byte {begin}"
            )
        await run_blocking(None, lambda: _copy(view, data))

    async def create_if_absent(self, name: str, data: bytes) -> bool:
        with self._translated(name):
            try:
                await obstore.put_async(self._store, self._begin + name, data, mode="create")
            except exceptions.AlreadyExistsError:
                return False
        return True

    async def replace(self, name: str, data: bytes) -> None:
        with self._translated(name):
            await obstore.put_async(self._store, self._begin + name, data)

    async def upload(
        self, name: str, pieces: AsyncIterator[memoryview], *, part_bytes: int, parts: int
    ) -> None:
        failed: list[BaseException] = []
        with self._translated(name):
            try:
                await obstore.put_async(
                    self._store,
                    self._begin + name,
                    _watched(pieces, failed),
                    chunk_size=part_bytes,
                    max_concurrency=parts,
                )
            except Exception:
                if failed:  # an error in our own pieces, which says better what is wrong
                    raise failed[0] from None
                raise

    async def copy(self, name: str, to: str) -> bool:
        source, target = self._begin + name, self._begin + to
        try:
            await obstore.copy_async(self._store, source, target)
        except (exceptions.BaseError, OSError) as error:  # S3 copies no object of more than 5 GB
            warn("archive.copy_failed", path=f"{self.where}/{to}", error=_words(error))
            return False
        return True

    async def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._translated(name):
                await obstore.delete_async(self._store, self._begin + name)

    async def close(self) -> None:
        """Does nothing: obstore's threads belong to the process."""

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Turn any error of the store into a StorageError that says what to do."""
        try:
            yield
        except (exceptions.BaseError, OSError, ValueError) as error:
            # Kept connections may lead to where the store was before. The next try resolves it
            # anew.
            self._store = self._connect()
            text = f"{self.where}/{name}: {_words(error)}"
            raise StorageError(f"{text}{_advice(error)}") from error


async def _watched(
    pieces: AsyncIterator[memoryview], failed: list[BaseException]
) -> AsyncIterator[memoryview]:
    """The same pieces. Their errors are kept in `failed`: obstore does not pass them on."""
    try:
        async for piece in pieces:
            yield piece
            del piece
    except Exception as error:
        failed.append(error)
        raise


def _copy(view: memoryview, data: obstore.Bytes) -> None:
    view[:] = memoryview(data)


def _words(error: BaseException) -> str:
    """The store's own words in one line, without the dump that follows them and without durations.
    So the same error always has the same text, and is logged once."""
    text = " ".join(str(error).split("\n\nDebug source:")[0].split())
    text = _TRIES.sub(" ", text)
    message = re.search(r"<Message>(.*?)</Message>", text)
    code = re.search(r"<Code>(.*?)</Code>", text)
    if message and code:
        return f"{code[1]}: {message[1]}"
    return text[:400] or type(error).__name__


def _advice(error: BaseException) -> str:
    text = str(error)
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if _NO_BUCKET.search(text):
        return "; create the bucket, or correct --archive"
    if isinstance(error, denied) or _DENIED.search(text):
        return "; check the credentials in the sidecar's environment"
    return ""

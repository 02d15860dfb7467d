"""Frames between the leader of a run and its members: one TLS connection each, on the event loop.

    kind (1 byte), length of the body (4 bytes, big-endian), body

Each side sends an empty message when it has sent nothing for a while, so silence means that the
connection is lost. One frame is on its way in each direction. One more waits to be sent, and a
newer one replaces it: each message says all that its reader has to know. So a slow reader costs a
bounded amount of memory and gets the newest state. The bytes of a message mean nothing here.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from keepstep.errors import ProtocolError

LARGEST_BYTES: Final = 8 << 20
_HEAD: Final = struct.Struct(">BI")
_PIECE_BYTES: Final = 64 << 10
_PIECES: Final = 16
"""How many pieces are moved before other connections have their turn."""
_RECORD_BYTES: Final = 16 << 10
"""OpenSSL moves one record at a time, of so many bytes at most."""
_LONGEST_REASON: Final = 1000


class FrameKind(IntEnum):
    """`MESSAGE`: of the run; an empty one says that the sender is alive. `HELLO`: names the sender,
    once, as the first frame of a member. `REFUSAL`: why the sender ends the connection, as text."""

    MESSAGE = 0
    HELLO = 1
    REFUSAL = 2


@dataclass(frozen=True, kw_only=True)
class ConnectionTimeouts:
    """`keep_alive_s`: an idle side sends after this long. `silence_s`: a connection on which
    nothing was received for this long is lost. `frame_s`: the longest time that a frame takes.
    `farewell_s`: how long a refused side may take to read why."""

    keep_alive_s: float = 10.0
    silence_s: float = 30.0
    frame_s: float = 30.0
    farewell_s: float = 2.0
    largest_bytes: int = LARGEST_BYTES


LIMITS: Final = ConnectionTimeouts()


def pack_frame(kind: FrameKind, body: bytes) -> bytes:
    """A frame, as it is sent."""
    return _HEAD.pack(kind, len(body)) + body


def refusal_frame(reason: str) -> bytes:
    """The frame that tells the other side why its connection ends."""
    return pack_frame(FrameKind.REFUSAL, reason[:_LONGEST_REASON].encode())


class FrameParser:
    """Takes frames out of a stream of bytes, which may be cut anywhere. `begun_at`: when the first
    byte came of the frame that is not complete yet; None if there is none."""

    def __init__(self, largest_bytes: int = LARGEST_BYTES) -> None:
        self.begun_at: float | None = None
        self._largest_bytes = largest_bytes
        self._data = bytearray()

    @property
    def held_bytes(self) -> int:
        """The bytes of the frame that is not complete yet."""
        return len(self._data)

    def feed(self, data: bytes, now: float = 0.0) -> Iterator[tuple[FrameKind, bytes]]:
        """The frames that `data` completes. Raises ProtocolError for what is no frame, or too long;
        the stream is of no use after that."""
        if not self._data:
            self.begun_at = now
        self._data += data
        while len(self._data) >= _HEAD.size:
            number, length = _HEAD.unpack_from(self._data)
            try:
                kind = FrameKind(number)
            except ValueError:
                raise ProtocolError(f"no kind of frame: {number}") from None
            if length > self._largest_bytes:
                raise ProtocolError(
                    f"a frame of {length} bytes; {self._largest_bytes} bytes are the most"
                )
            end = _HEAD.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_HEAD.size : end])
            del self._data[:end]
            self.begun_at = now if self._data else None
            yield kind, body


class Frames:
    """One connection, for the event loop on which it is made.

    `take(kind, body)` gets each frame in order. `ended(reason)` is called once, soon after the
    connection has failed or is refused by either side; nothing is taken after that.
    `explain(error)`: what a person is told about an error of the connection.
    """

    def __init__(
        self,
        secure: ssl.SSLSocket,
        *,
        take: Callable[[FrameKind, bytes], None],
        ended: Callable[[str], None],
        explain: Callable[[OSError], str],
        limits: ConnectionTimeouts = LIMITS,
    ) -> None:
        """Takes the connection over, after its handshake."""
        self._loop = asyncio.get_running_loop()
        self._secure, self._limits = secure, limits
        self._take, self._ended, self._explain = take, ended, explain
        self._parser = FrameParser(limits.largest_bytes)
        self._sending, self._next = memoryview(b""), b""
        self._open = self._working = True  # not open, but working: a refusal is on its way
        self._failure = ""
        self._received_at = self._sent_at = self._loop.time()
        secure.setblocking(False)
        self._loop.add_reader(secure, self._read)
        self._timer: asyncio.Handle = self._loop.call_soon(self._watch)
        self._loop.call_soon(self._read)  # what was received with the handshake

    @property
    def quiet_s(self) -> float:
        """For how long nothing was received."""
        return self._loop.time() - self._received_at

    # --- what the owner does -----------------------------------------------------------------

    def send(self, body: bytes, kind: FrameKind = FrameKind.MESSAGE) -> None:
        """Send a frame in place of one that still waits. Never blocks, and never raises."""
        if self._open:
            self._next = pack_frame(kind, body)
            self._write()

    def refuse(self, reason: str) -> None:
        """Tell the other side why, then close. Idempotent."""
        if self._open:
            self._next = refusal_frame(reason)
            self._end(reason)
            self._timer.cancel()
            self._timer = self._loop.call_later(self._limits.farewell_s, self.close)
            self._write()

    def close(self, reason: str = "closed") -> None:
        """Close at once. Idempotent."""
        self._end(reason)
        if self._working:
            self._working = False
            self._timer.cancel()
            self._loop.remove_reader(self._secure)
            self._loop.remove_writer(self._secure)
            self._secure.close()

    def _end(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._loop.call_soon(self._ended, reason)

    # --- what happens on the connection ------------------------------------------------------

    def _read(self) -> None:
        if not self._working:
            return
        try:
            for _ in range(_PIECES):
                if not (data := self._secure.recv(_PIECE_BYTES)):
                    return self.close(self._failure or "the other side closed the connection")
                self._received(data)
                if not self._working:
                    return None
                if len(data) < _RECORD_BYTES and not self._failure:
                    break  # the event loop comes again if there is more
            if self._secure.pending():  # the socket does not become readable for these
                self._loop.call_soon(self._read)
        except ssl.SSLWantReadError:
            if self._failure:  # nothing is left that would say why sending failed
                return self.close(self._failure)
        except ssl.SSLWantWriteError:
            self._loop.add_writer(self._secure, self._read)
        except ProtocolError as error:
            self.refuse(str(error))
        except OSError as error:
            return self.close(self._explain(error))
        except BaseException:
            self.close("an error here")
            raise
        self._write()
        return None

    def _received(self, data: bytes) -> None:
        self._received_at = now = self._loop.time()
        for kind, body in self._parser.feed(data, now) if self._open else ():
            if kind is FrameKind.REFUSAL:
                return self.close(body[:_LONGEST_REASON].decode(errors="replace"))
            self._take(kind, body)
            if not self._open:
                return None
        return None

    def _write(self) -> None:
        if not self._working or self._failure:
            return
        try:
            for _ in range(_PIECES):
                if not self._sending:
                    if not self._next:
                        break
                    self._sending, self._next = memoryview(self._next), b""
                    self._sent_at = self._loop.time()
                sent = self._secure.send(self._sending[:_PIECE_BYTES])
                self._sending = self._sending[sent:]
        except ssl.SSLWantWriteError:
            pass
        except ssl.SSLWantReadError:
            return  # the next read writes, too
        except OSError as error:
            # The other side may have said why, in bytes that are not read yet.
            self._failure = self._explain(error)
            self._loop.call_soon(self._read)
        if (self._sending or self._next) and not self._failure:
            self._loop.add_writer(self._secure, self._read)
        else:
            self._loop.remove_writer(self._secure)

    def _watch(self) -> None:
        """Keep the connection alive, and end it when it is not."""
        now, keep_alive_s = self._loop.time(), self._limits.keep_alive_s
        due, reason = min(self._deadlines())
        if due <= now:
            return self.refuse(reason)
        if not (self._sending or self._next) and self._sent_at + keep_alive_s <= now:
            self.send(b"")
        again = keep_alive_s + (now if self._sending else self._sent_at)
        self._timer = self._loop.call_at(min(due, again), self._watch)
        return None

    def _deadlines(self) -> Iterator[tuple[float, str]]:
        limits = self._limits
        yield self._received_at + limits.silence_s, f"silent for {limits.silence_s:g} s"
        if self._parser.begun_at is not None:
            reason = f"a frame was not sent within {limits.frame_s:g} s"
            yield self._parser.begun_at + limits.frame_s, reason
        if self._sending:
            reason = f"a frame was not read within {limits.frame_s:g} s"
            yield self._sent_at + limits.frame_s, reason

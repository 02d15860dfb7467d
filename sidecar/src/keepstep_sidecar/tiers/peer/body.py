"""Bytes of a body, from a TLS connection into the buffer where they are wanted.

Past the layers of `http.client`, `http.server` and `io`: a record is 16 KiB, and for each of them
those cost as much as its decryption.
"""

from __future__ import annotations

import io
import socket


def receive(buffered: io.BufferedReader, secure: socket.socket, into: memoryview) -> int:
    """Fill `into`, all of which must be of the body: what was read ahead with its head, then from
    the connection itself. The bytes that came: fewer only where the connection ended."""
    done = min(len(buffered.peek()), len(into))
    into[:done] = buffered.read(done)
    while done < len(into):
        with into[done:] as rest:
            count = secure.recv_into(rest, len(rest))
        if not count:
            break
        done += count
    return done

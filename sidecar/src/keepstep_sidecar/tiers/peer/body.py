"""Moves bytes of a body from a TLS connection straight into the buffer where they are needed.

It bypasses the layers of `http.client`, `http.server` and `io`. A record is 16 KiB, and for each
record these layers cost as much as its decryption.
"""

from __future__ import annotations

import io
import socket


def receive(buffered: io.BufferedReader, secure: socket.socket, into: memoryview) -> int:
    """Fill `into`, all of which must belong to the body: first with what was read ahead with the
    head, then from the connection itself. Returns the number of bytes; fewer only if the connection
    ended."""
    done = min(len(buffered.peek()), len(into))
    into[:done] = buffered.read(done)
    while done < len(into):
        with into[done:] as rest:
            count = secure.recv_into(rest, len(rest))
        if not count:
            break
        done += count
    return done

"""A real TLS handshake over a socket pair: would this client accept this server?"""

from __future__ import annotations

import socket
import ssl
import tempfile
import threading
from pathlib import Path

from keepstep_operator.certificates.pki import Pair


def shakes_hands(
    leaf: Pair, *, bundle: bytes, name: str, flags: ssl.VerifyFlags = ssl.VERIFY_DEFAULT
) -> str:
    """Why a client that trusts `bundle` and calls `name` refuses the server; '' if it accepts."""
    client_socket, server_socket = socket.socketpair()
    server = threading.Thread(target=_serve, args=(server_socket, leaf))
    server.start()
    try:
        trust = ssl.create_default_context(cadata=bundle.decode())
        trust.verify_flags |= flags
        client_socket.settimeout(10)
        with trust.wrap_socket(client_socket, server_hostname=name) as client:
            assert client.recv(2) == b"ok"
        return ""
    except ssl.SSLError as error:
        return str(error)
    finally:
        client_socket.close()
        server.join()


def _serve(raw: socket.socket, leaf: Pair) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as directory:
        both = Path(directory) / "both.pem"
        both.write_bytes(leaf.certificate + leaf.key)
        context.load_cert_chain(both)
    raw.settimeout(10)
    with raw:
        try:
            with context.wrap_socket(raw, server_side=True) as server:
                server.sendall(b"ok")
        except OSError:
            return  # the client did not accept us

"""Measures what a machine that lost its drive waits for: copies at a buddy and in an archive, and
restores from both, with whole sidecars on loopback.

Peers have as their floor plain TLS between two processes, over as many streams as keepstep uses;
the receiver digests each chunk. An archive has `obstore.put` and `obstore.get` of the same file at
the same S3 gateway, which shares cores and drive with the sidecar.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.lives import Trainer
from bench.ours import slots_for
from bench.processes import Sidecar
from keepstep.image.layout import CHUNK_BYTES
from keepstep.image.xxh3 import xxh3_128
from keepstep_sidecar.tiers.peer.secret import make_secret
from tests.archive.gateway import ACCESS, SECRET, Gateway, free_port
from tests.peer.authority import Authority

Figures = dict[str, float]
_STREAMS = 4
_LIMIT_S = 180.0


def peers(size_bytes: int, directory: Path) -> Figures:
    """A step is copied to a buddy; then the machine loses memory and drive, and restores it."""
    files = Authority(directory / "certificates").files(0)  # of the floor
    secret = directory / "secret"
    secret.write_text(make_secret())
    secret.chmod(0o600)
    ports = [free_port(), free_port()]
    nodes = []
    for rank in (0, 1):
        options = ("--nodes", "2", "--node-rank", str(rank), "--secret-file", str(secret))
        options += ("--leader", f"127.0.0.1:{ports[0]}")
        options += ("--peer-listen", f"127.0.0.1:{ports[rank]}")
        slots = slots_for(size_bytes)
        nodes.append(Sidecar(directory / f"node-{rank}", slots=slots, options=options))
    here, buddy = nodes
    try:
        floor_s = _tls_s(size_bytes, files.certificate, files.key)
        for node in nodes:
            node.begin()
        copied = _copied_s(size_bytes, here, buddy.volume / "bench/peers", "rank-*.safetensors")
        restored = _restored(size_bytes, here, "peer")
    except Exception as error:
        raise RuntimeError(f"{error}\n{here.text()[-3000:]}") from error
    finally:
        for node in nodes:
            node.close()
    return {"peer_copy_s": copied, "peer_restore_s": restored, "peer_floor_s": floor_s}


def archive(size_bytes: int, directory: Path) -> Figures:
    """A step is archived; then the machine loses memory and drive, and restores it."""
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
    directory.mkdir(parents=True, exist_ok=True)
    gateway = Gateway(directory / "buckets", directory / "gateway.log").start()
    bucket = gateway.bucket("steps")
    options = ["--archive", "s3://steps/runs", "--archive-every", "1"]
    options += ["--archive-endpoint", gateway.endpoint, "--archive-region", "us-east-1"]
    here = Sidecar(directory / "node", slots=slots_for(size_bytes), options=(*options,))
    try:
        here.begin()
        archived = _copied_s(size_bytes, here, bucket / "runs/bench", "step.json")
        shard = next((directory / "node").rglob("rank-*.safetensors"))
        put_s, get_s = _object_s(shard, gateway.endpoint)
        restored = _restored(size_bytes, here, "archive")
    except Exception as error:
        raise RuntimeError(f"{error}\n{here.text()[-3000:]}") from error
    finally:
        here.close()
        gateway.stop()
    return {
        "archive_copy_s": archived,
        "archive_restore_s": restored,
        "archive_put_s": put_s,
        "archive_get_s": get_s,
    }


def _copied_s(size_bytes: int, sidecar: Sidecar, run: Path, last: str) -> float:
    """Seconds from durable, when the drive has a step, until the other tier has it: `run` is its
    directory of the run, `last` the file of a step that is written last. The second step counts:
    slots and connections are made at the first one. Steps are far apart, so that none is written
    meanwhile."""
    apart_s = 2.0 + 8e-9 * size_bytes
    options = ("--step-s", f"{apart_s}", "--reach", "durable")
    trainer = Trainer(size_bytes, *options, socket=sidecar.socket)
    try:
        for _ in range(2):
            durable = trainer.until("durable")
            while not list(run.glob(f"*-{durable['step']:09d}/{last}")):
                if time.monotonic() > durable["at"] + _LIMIT_S:
                    raise RuntimeError(f"no copy within {_LIMIT_S:.0f} s")
                time.sleep(0.005)
            seconds = time.monotonic() - durable["at"]
        return float(seconds)
    finally:
        trainer.end()


def _restored(size_bytes: int, sidecar: Sidecar, tier: str) -> float:
    """Seconds of `restore()` on a machine whose memory and drive are empty."""
    sidecar.kill()
    sidecar.lose_memory()
    shutil.rmtree(sidecar.volume)
    trainer = Trainer(size_bytes, "--wait-for", str(sidecar.socket), socket=sidecar.socket)
    try:
        trainer.until("built")
        sidecar.begin()
        restored = trainer.until("restored")
    finally:
        trainer.end()
    if restored["tier"] != tier:
        raise RuntimeError(f"restored from {restored['tier']}, not from {tier}")
    return float(restored["seconds"])


# --- floors --------------------------------------------------------------------------------------


def _object_s(shard: Path, endpoint: str) -> tuple[float, float]:
    """Seconds to put the file into the bucket, and to get and digest it."""
    import obstore
    from obstore.store import S3Store

    client = {"allow_http": True, "timeout": "120s"}
    store = S3Store("steps", endpoint=endpoint, region="us-east-1", client_options=client)
    data = shard.read_bytes()

    def get(at: int) -> None:
        length = min(CHUNK_BYTES, len(data) - at)
        xxh3_128(memoryview(obstore.get_range(store, "floor", start=at, length=length)))

    began = time.perf_counter()
    obstore.put(store, "floor", data, chunk_size=CHUNK_BYTES, max_concurrency=_STREAMS)
    put = time.perf_counter()
    with ThreadPoolExecutor(_STREAMS) as threads:
        list(threads.map(get, range(0, len(data), CHUNK_BYTES)))
    return put - began, time.perf_counter() - put


def _tls_s(size_bytes: int, certificate: Path, key: Path) -> float:
    """Seconds to move `size_bytes` from one process to another, received and digested."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    each = max(1, size_bytes // _STREAMS // CHUNK_BYTES)
    listener = socket.create_server(("127.0.0.1", 0))
    sender = multiprocessing.get_context("fork").Process(
        target=_send, args=(listener, server, each), daemon=True
    )
    sender.start()
    try:
        address = listener.getsockname()
        began = time.perf_counter()
        with ThreadPoolExecutor(_STREAMS) as threads:
            list(threads.map(_receive, [address] * _STREAMS, [each] * _STREAMS))
        return (time.perf_counter() - began) * size_bytes / (each * _STREAMS * CHUNK_BYTES)
    finally:
        sender.kill()
        sender.join()
        listener.close()


def _send(listener: socket.socket, context: ssl.SSLContext, chunks: int) -> None:
    data = bytes(CHUNK_BYTES)

    def pour(_: int) -> None:
        with context.wrap_socket(listener.accept()[0], server_side=True) as tls:
            for _ in range(chunks):
                tls.sendall(data)

    with ThreadPoolExecutor(_STREAMS) as threads:
        list(threads.map(pour, range(_STREAMS)))


def _receive(address: tuple[str, int], chunks: int) -> None:
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    view = memoryview(bytearray(CHUNK_BYTES))
    with client.wrap_socket(socket.create_connection(address)) as tls:
        for _ in range(chunks):
            done = 0
            while done < CHUNK_BYTES:
                done += tls.recv_into(view[done:])
            xxh3_128(view)

"""The other ways to save a PyTorch state, each in the best configuration that it documents.

`make build/peers/.ready` installs and compiles some of them, apart from the environment that pins
torch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch

from bench.processes import ROOT
from bench.savers import Saver, fsync, fsync_tree
from bench.state import State

PEERS_DIR = ROOT / "build" / "peers"


class PeerMissing(Exception):
    """This peer cannot run here; the message says why."""


class TorchSave(Saver):
    name = "torch.save + fsync"
    blocking = True

    def save(self, step: int) -> None:
        with open(self.path(step), "wb") as file:
            torch.save(self.state.nested(), file)
            file.flush()
            os.fsync(file.fileno())
        fsync(self.directory)


class Safetensors(Saver):
    name = "safetensors + fsync"
    blocking = True

    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise PeerMissing("safetensors is not installed") from error
        self._save_file = save_file

    def save(self, step: int) -> None:
        self._save_file(self.state.tensors(), self.path(step))
        fsync(self.path(step))
        fsync(self.directory)


class DcpSave(Saver):
    name = "dcp.save"
    note = "FileSystemWriter with its default sync_files=True"
    blocking = True

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings(action="ignore"):
            dcp.save(self.state.nested(), checkpoint_id=self.path(step), no_dist=True)
        fsync(self.directory)


class _DcpAsync(Saver):
    """`dcp.async_save`. Every save waits for the previous one, as torch requires."""

    process: ClassVar[bool] = False
    keeps_stager: ClassVar[bool] = False

    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        self._upload: Any = None
        self._staging: Any = None
        self._stager: Any = self._make_stager() if self.keeps_stager else None
        self._store = tempfile.TemporaryDirectory()
        _join_group_of_one(self._store.name)

    def _make_stager(self) -> Any:
        raise NotImplementedError

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.fence()
        self.wait_durable()
        kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
        with warnings.catch_warnings(action="ignore"):
            response = dcp.async_save(
                self.state.nested(),
                checkpoint_id=self.path(step),
                async_checkpointer_type=kind,
                async_stager=self._stager,
            )
        self._staging = getattr(response, "staging_completion", None)
        self._upload = getattr(response, "upload_completion", response)

    def fence(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def wait_durable(self) -> None:
        if self._upload is not None:
            self._upload.result()
            self._upload = None
            fsync(self.directory)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        torch.distributed.destroy_process_group()
        self._store.cleanup()
        super().close()


class DcpAsyncThread(_DcpAsync):
    name = "dcp.async_save thread"
    note = "AsyncCheckpointerType.THREAD, default stager"


class DcpAsyncProcess(_DcpAsync):
    name = "dcp.async_save process"
    note = "AsyncCheckpointerType.PROCESS, default stager"
    process = True


class DcpAsyncReused(_DcpAsync):
    name = "dcp.async_save reused stager"
    note = "PROCESS, one DefaultStager kept for all saves, shared memory, staging in a thread" + (
        ", pinned memory where there is CUDA"
    )
    process = True
    keeps_stager = True

    def _make_stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        cuda = torch.cuda.is_available()
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=cuda,
            )
        )
        # torch 2.11 closes what is inside after each save, and the next one fails with
        # `KeyError: <class 'type'>` (pytorch#183424)
        inner: Any = stager._state_dict_stager
        inner.close = lambda: None
        return stager


class TorchCheckpointing(Saver):
    name = "torch_checkpointing"
    note = (
        "CheckpointManager, asynchronous, shared memory; use_direct_io=False because its default"
        " fails with EINVAL on ext4 (unaligned O_DIRECT); the fsync is ours"
    )

    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        package, storage = _of_peer("torch_checkpointing", "", ".storage.filesystem")
        buffered = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = package.CheckpointManager.Config(storage_config=buffered).build()
        self._write: Any = None
        self._last = 0

    def save(self, step: int) -> None:
        self.wait_durable()
        self._last = step
        self._write = self._manager.save(str(self.path(step)), self.state.nested())

    def fence(self) -> None:
        with self._manager.lock():
            pass

    def wait_durable(self) -> None:
        if self._write is not None:
            self._write.result()
            self._write = None
            fsync_tree(self.path(self._last))

    def close(self) -> None:
        self._manager.close()
        super().close()


class LmResiliency(Saver):
    name = "LM-Resiliency GEMINI"
    note = "save_tensors of every step into two pinned buffers, no peer; durable is flush_to_disk"

    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        parts = ".checkpointing.manager", ".checkpointing.config"
        manager, config = _of_peer("lm_resiliency", *parts)
        settings = config.InMemoryCkptConfig(
            interval=1,
            disk_flush_interval=0,
            disk_folder=str(directory / "lm-resiliency"),
            run_id="bench",
            pin_memory=torch.cuda.is_available(),
        )
        self._manager = manager.InMemoryCheckpointManager(settings)
        self._tensors = list(state.tensors().values())
        self._last = 0

    def save(self, step: int) -> None:
        self._last = step
        self._manager.save_tensors(self._tensors, step)

    def fence(self) -> None:
        self._manager.maybe_wait()

    def wait_durable(self) -> None:
        self._manager.flush_to_disk(self._last)
        fsync_tree(self.directory)

    def close(self) -> None:
        self._manager.close()
        super().close()


class FastPersist(Saver):
    name = "DeepSpeed FastPersist"
    note = (
        "FastFileWriter under torch.save, double buffer of 2 x 64 MiB page-locked, aio blocks of"
        " 8 MiB, queue depth 16, one thread, the old serialization (checkpoint_serialization:"
        " False; both were faster here than their alternatives); it ends with fsync"
    )
    blocking = True

    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        _see_peers()
        built = PEERS_DIR / "extensions" / "async_io" / "async_io.so"
        if not built.exists():
            log = PEERS_DIR / "deepspeed.log"
            why = log.read_text().strip()[-500:] if log.exists() else "make build/peers/.ready"
            raise PeerMissing(f"async_io was not built here: {why}")
        os.environ["TORCH_EXTENSIONS_DIR"] = str(PEERS_DIR / "extensions")
        os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
        os.environ["PATH"] = f"{PEERS_DIR / 'site' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        try:
            with contextlib.redirect_stdout(sys.stderr):  # the result goes to stdout
                io = importlib.import_module("deepspeed.io")
                builder = importlib.import_module("deepspeed.ops.op_builder")
                aio = builder.AsyncIOBuilder().load(verbose=False)
        except Exception as error:
            raise PeerMissing(f"DeepSpeed's async_io does not load: {error}") from error
        # torch.save never calls the casts of this op, which does not load without CUDA
        vars(importlib.import_module("deepspeed.io.fast_file_writer"))["UtilsBuilder"] = _NoCasts
        self._io = io
        self._handle = aio.aio_handle(
            block_size=8 << 20,
            queue_depth=16,
            single_submit=False,
            overlap_events=True,
            intra_op_parallelism=1,
        )
        self._buffer = self._handle.new_cpu_locked_tensor(
            128 << 20, torch.empty(0, dtype=torch.uint8)
        )
        self._buffer.zero_()

    def save(self, step: int) -> None:
        config = self._io.FastFileWriterConfig(
            dnvme_handle=self._handle, pinned_tensor=self._buffer
        )
        with contextlib.redirect_stdout(sys.stderr):
            writer = self._io.FastFileWriter(file_path=str(self.path(step)), config=config)
            torch.save(self.state.nested(), writer, _use_new_zipfile_serialization=False)
            writer.close()
        fsync(self.directory)


PEERS: tuple[type[Saver], ...] = (
    TorchSave,
    Safetensors,
    DcpSave,
    DcpAsyncThread,
    DcpAsyncProcess,
    DcpAsyncReused,
    TorchCheckpointing,
    LmResiliency,
    FastPersist,
)


class _NoCasts:
    """Stands in for DeepSpeed's UtilsBuilder."""

    cast_to_byte_tensor = None

    def load(self) -> type[_NoCasts]:
        return _NoCasts


def _of_peer(package: str, *modules: str) -> list[Any]:
    """Modules of a peer's package. Raises PeerMissing."""
    _see_peers()
    try:
        return [importlib.import_module(f"{package}{module}") for module in modules]
    except ImportError as error:
        raise PeerMissing(f"{package} is not installed: {error}") from error


def _see_peers() -> None:
    site = str(PEERS_DIR / "site")
    if site not in sys.path:
        sys.path.append(site)
    # processes that a peer spawns must find it too
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, parts), site])


def _join_group_of_one(directory: str) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=0, world_size=1
        )

"""Trains on a GPU until it is killed or done: `python -m tests.gpu.trainer VARIANT LOG`.

The lines of LOG, one write each, say what this process believes: the digest of what it restored,
each step whose `save` returned, and the digest of the end. Each variant is a way to train that
queues its work on the device in its own manner. LIVES says after how many steps each life is to
kill itself, at a random moment of the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

import keepstep

WIDTH, LAYERS, BATCH = 1024, 6, 16
STEPS = 70
_PACED = 12  # steps of a life that give the sidecar the time to make its slots


class Mlp(nn.Module):
    """Layers with dropout, which draws from the device's generator, and a buffer that counts."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        for layer in self.layers:
            x = x + functional.dropout(functional.gelu(layer(x)), 0.1, self.training)
        return x.square().mean()


class Images(nn.Module):
    """Convolutions in the channels-last format, with the buffers of batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((8, 256), (256, 512), (512, 512))
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in sizes
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(BATCH, 8, 16, 8).to(memory_format=torch.channels_last)
        mixed: Tensor = self.layers(images)
        return mixed.square().mean()


class Training:
    """Model, optimizer and a step, as the name of the variant says."""

    def __init__(self, variant: str, device: torch.device) -> None:
        self.variant, self.device = variant, device
        self.on_cpu = torch.zeros(4)
        kind = Images if variant == "channels-last" else Mlp
        self.model: nn.Module = kind().to(device)
        if variant == "channels-last":
            self.model.to(memory_format=torch.channels_last)
        if variant == "bf16":
            self.model.to(torch.bfloat16)
        if variant == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for layer in self.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        if variant in ("ddp", "gloo"):
            self.model = nn.parallel.DistributedDataParallel(self.model)
        options: dict[str, Any] = {
            "bf16": {"fused": True},
            "amp": {"fused": True},
            "graph": {"capturable": True},
            "capturable": {"capturable": True, "foreach": True},
        }.get(variant, {})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.scaler = torch.amp.GradScaler(device.type, enabled=variant == "amp")
        self.stream = torch.Stream(device) if variant == "stream" else None
        self.compute = torch.compile(self.model) if variant == "compile" else self.model
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs = torch.zeros(BATCH, WIDTH, device=device)

    def components(self) -> dict[str, Any]:
        kept = {"model": self.model, "optimizer": self.optimizer, "host": {"counts": self.on_cpu}}
        return kept | ({"scaler": self.scaler} if self.scaler.is_enabled() else {})

    def tensors(self) -> list[Tensor]:
        """All that is kept, in an order of its own."""
        found = [*self.model.parameters(), *self.model.buffers(), self.on_cpu]
        for state in self.optimizer.state.values():
            found += [state[key] for key in sorted(state)]
        return [getattr(tensor, "_local_tensor", tensor).detach() for tensor in found]

    def digest(self) -> str:
        state = xxhash.xxh3_128()
        for tensor in self.tensors():
            state.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        if self.scaler.is_enabled():
            state.update(json.dumps(self.scaler.state_dict()).encode())
        return str(state.hexdigest())

    def step(
        self, step: int, mutating: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        numbers = torch.Generator().manual_seed(step)
        self.inputs.copy_(torch.randn(BATCH, WIDTH, generator=numbers))
        self.on_cpu += step
        if self.variant == "graph":
            self._replay(mutating)
        elif self.stream is not None:
            main = torch.accelerator.current_stream()
            self.stream.wait_stream(main)
            with self.stream:
                self._compute(self.inputs)
            main.wait_stream(self.stream)
        else:
            self._compute(self.inputs)

    def _compute(self, inputs: Tensor) -> None:
        mixed = self.variant == "amp"
        if self.variant == "bf16":
            inputs = inputs.bfloat16()
        with torch.autocast(self.device.type, torch.float16, enabled=mixed):
            loss = self.compute(inputs)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=False)

    def _replay(self, mutating: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """The whole step as one graph: no hook of the optimizer runs at a replay."""
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._compute(self.inputs)
        with mutating():
            self.graph.replay()

    def warm(self) -> None:
        """What a graph needs before it can be captured; leaves the state as it was."""
        before = {key: value.clone() for key, value in self.model.state_dict().items()}
        other = torch.Stream(self.device)
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            for _ in range(3):
                self._compute(self.inputs)
        torch.accelerator.synchronize()
        self.model.load_state_dict(before)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()


def main(variant: str, log: str) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(os.environ.get("TRAIN_ON", "cuda"), 0)
    torch.use_deterministic_algorithms(True)
    if variant in ("ddp", "fsdp", "gloo"):
        gloo = variant == "gloo" or device.type == "cpu"
        torch.distributed.init_process_group("gloo" if gloo else "nccl")
    torch.manual_seed(7)
    training = Training(variant, device)
    if variant == "graph":
        training.warm()
    path = Path(f"{log}-{rank}")
    earlier = path.read_text().count('"began"') if path.exists() else 0
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def emit(event: str, **what: Any) -> None:
        os.write(out, (json.dumps({"event": event, **what}) + "\n").encode())

    torch.manual_seed(8)
    checkpointer = None
    if "KEEPSTEP_SOCKET" in os.environ:
        checkpointer = keepstep.Checkpointer(training.components(), lazy=variant != "eager")
    at = checkpointer.restore() if checkpointer else None
    first = at.step + 1 if at else 0
    emit("began", first=first, tier=str(at.tier) if at else "", digest=training.digest())
    lives = json.loads(os.environ.get("LIVES", "[]"))
    last = first + lives[earlier] if earlier < len(lives) else STEPS
    mutating = checkpointer.mutating if checkpointer else contextlib.nullcontext
    for step in range(first, STEPS):
        if step == last and rank == world - 1:
            if variant == "assert":  # the context is lost, as it is by an error of the hardware
                torch.zeros(4, device=device)[torch.full((1,), 9, device=device)].sum()
            else:
                _die_within(0.02)
        training.step(step, mutating)
        if checkpointer is None:
            emit("step", step=step, digest=training.digest())
            continue
        kept = checkpointer.save(step)
        emit("saved", step=step, kept=kept)
        if step < first + _PACED:
            time.sleep(0.05)
    if checkpointer is not None:
        mappings = checkpointer._saver._mappings.values()  # type: ignore[union-attr]
        pinned = [
            torch.frombuffer(mapping.memory, dtype=torch.uint8).is_pinned() for mapping in mappings
        ]
        checkpointer.close()
        stats = checkpointer.stats
        counts = {"discarded": stats.discarded, "skipped": stats.skipped, "saves": stats.saves}
        emit("closed", pinned=pinned, reasons=stats.reasons, **counts)
    emit("ended", digest=training.digest())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _die_within(seconds: float) -> None:
    """SIGKILL this process at a random moment, from another thread."""
    moment = random.random() * seconds

    def strike() -> None:
        time.sleep(moment)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])

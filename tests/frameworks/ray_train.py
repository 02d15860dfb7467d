"""A training by Ray Train on two nodes, `python ray_train.py OUT SETTINGS` as in script.py: raylets
on this machine with an address and a directory each. Where `bare` is set, without Ray by torchrun.

`lose`: the step at which the second node is lost with all that it holds. The training goes on with
one worker, and with two once there is a second node again; it ends 15 steps later. `lives` in OUT
has what each life began with. `notice`: the step from which on Ray says that the second node is to
go; the training ends once the sidecars have flushed. `part`, with `bare`: the steps to do, of a
training that goes on from its last part by torch.save; `random`: whether rank 0 takes its random
states over, too. `shm`: the bytes of shared memory of the second node; 0 for none. `storage`: where
Ray keeps what is reported, if not in OUT.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

_STEPS = 30
_LAST_STEPS = 15
_WAIT_S = 240.0


def nodes(out: Path) -> tuple[str, str]:
    """The addresses of the nodes of the training in this folder: no other training's."""
    where = zlib.crc32(str(out.resolve()).encode())
    return tuple(f"127.{where % 251 + 1}.{where // 251 % 251}.{host}" for host in (2, 3))


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    faulthandler.dump_traceback_later(_WAIT_S)  # where it hangs, the test's log says where
    sys.argv = ["", config["out"], json.dumps(config)]
    import ray
    import ray.train
    import torch
    from ray.train.torch import prepare_model

    from keepstep.integrations.ray import checkpointer
    from keepstep.steps import StepId
    from tests.frameworks import script

    bare, world = config.get("bare"), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(script.RANK)
    layers = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    model: Any = torch.nn.Sequential(*layers)
    if not bare:
        model = prepare_model(model)
    elif world > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept, begin, handed = None, 0, {"model": model, "optimizer": optimizer}
    here, second = "" if bare else ray.util.get_node_ip_address(), nodes(script.OUT)[1]
    if not bare:
        kept = checkpointer(handed, dir=script.OUT / here, strict=True)
        if (at := kept.restore()) is not None:
            begin = at.step + 1
    elif "part" in config:
        begin = config["part"][0]
        _take_over(handed)
    for step in _steps(begin, world):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        script.maybe_kill(step)
        if step == config.get("notice") and here == second:
            (script.OUT / "notice").touch()
        if step == config.get("lose") and here == second:
            (script.OUT / "lose").touch()
            threading.Event().wait(_WAIT_S)
        optimizer.step()
        script.record(step, loss)
        if kept is not None:
            kept.save(step)
            if script.RANK == 0:
                with (script.OUT / "weights").open("a") as file:
                    line = [str(StepId(kept.epoch.id, step)), layers[0].weight.tolist()]
                    file.write(json.dumps(line) + "\n")
            if step % 5 == 4:
                kept.report({"step": step})
    script.write({"model": script.digest(model.state_dict()), "random": script.random_states()})
    if kept is not None:
        kept.close()
        kept.report({"step": step})
    elif "part" in config:
        _hand_over(handed)


def _steps(begin: int, world: int) -> Iterator[int]:
    """The steps of this life."""
    from tests.frameworks import script

    if script.RANK == 0:
        with (script.OUT / "lives").open("a") as file:
            file.write(json.dumps([world, begin]) + "\n")
    if "notice" in script.SETTINGS:
        return _until((script.OUT / "flushed").exists, begin)
    if "lose" in script.SETTINGS:
        last = begin > 0 and world == 2
        return iter(range(begin, begin + _LAST_STEPS)) if last else _until(lambda: False, begin)
    return iter(range(*script.SETTINGS.get("part", (begin, _STEPS))))


def _until(over: Callable[[], bool], begin: int) -> Iterator[int]:
    """Steps until this is over for all ranks, or Ray ends this process for another world."""
    import torch

    deadline = time.monotonic() + _WAIT_S
    for step in range(begin, 10**6):
        yield step
        threading.Event().wait(0.02)  # the time that a step takes
        assert time.monotonic() < deadline, "Ray did nothing"
        ended = torch.tensor(int(over()))
        torch.distributed.all_reduce(ended)
        if ended:
            return


def _hand_over(components: dict[str, Any]) -> None:
    """What a training without keepstep saves: rank 0 all that is alike, each its generator."""
    import torch

    from tests.frameworks import script

    if script.RANK == 0:
        model = getattr(components["model"], "module", components["model"])
        torch.save(
            [model.state_dict(), components["optimizer"].state_dict()], script.OUT / "handed"
        )
        torch.save(torch.get_rng_state(), script.OUT / "random")


def _take_over(components: dict[str, Any]) -> None:
    import torch

    from tests.frameworks import script

    if not (script.OUT / "handed").exists():
        return
    model = getattr(components["model"], "module", components["model"])
    states = torch.load(script.OUT / "handed")
    model.load_state_dict(states[0])
    components["optimizer"].load_state_dict(states[1])
    if script.RANK == 0 and script.SETTINGS["random"]:
        torch.set_rng_state(torch.load(script.OUT / "random"))


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.05)


def _begin(function: Callable[[], Any]) -> Future[Any]:
    """Run it on a thread that does not keep this process alive where the main thread fails."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class _Cluster:
    """The nodes, each a raylet; the first is the head, and stays."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        from ray.cluster_utils import Cluster

        self._out, self._settings, self._addresses = out, settings, nodes(out)
        self._cluster = Cluster()
        # how soon Ray notices that a node is gone
        often = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
        self._cluster.add_node(
            num_cpus=1,
            node_ip_address=self._addresses[0],
            include_dashboard=False,
            _system_config=often,
        )
        self.address = self._cluster.address
        self._second: Any = None
        self._apart: subprocess.Popen[bytes] | None = None
        self.add()

    def add(self) -> None:
        if "shm" in self._settings:
            return self._add_apart(self._settings["shm"])
        self._second = self._cluster.add_node(num_cpus=1, node_ip_address=self._addresses[1])

    def _add_apart(self, shm_bytes: int) -> None:
        """The second node, with shared memory of its own."""
        options = f"size={shm_bytes}" if shm_bytes else "ro"
        script = f"mount -t tmpfs -o {options} none /dev/shm && exec ray start --block"
        script += f" --address {self.address} --node-ip-address {self._addresses[1]} --num-cpus 1"
        script += f" --plasma-directory {self._out} --object-store-memory 100000000"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._apart = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", script],
            env={**os.environ, "PATH": path},
            start_new_session=True,
        )
        import ray

        ray.init(address=self.address)
        _wait(lambda: len([node for node in ray.nodes() if node["Alive"]]) == 2)

    def lose(self) -> None:
        """When the second node asks for that, with its drive and memory."""
        import psutil

        from keepstep_sidecar.cli.run_dir import memory_directory
        from tests.cli.conftest import words_of

        _wait((self._out / "lose").exists)
        drive = self._out / self._addresses[1]
        self._cluster.remove_node(self._second, allow_graceful=False)
        for process in psutil.process_iter():
            if any(str(drive) in word for word in words_of(process)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                    process.wait(30)
        for run in drive.iterdir():
            shutil.rmtree(memory_directory(drive, run.name), ignore_errors=True)
        shutil.rmtree(drive)

    def announce(self) -> None:
        """When the second node asks for that, do what `ray drain-node` does."""
        import ray
        from ray.core.generated import autoscaler_pb2

        second = self._addresses[1]
        _wait((self._out / "notice").exists)
        (node,) = (node for node in ray.nodes() if node["NodeManagerAddress"] == second)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + _WAIT_S) * 1000)
        client = ray._raylet.GcsClient(address=self.address)
        accepted, why = client.drain_node(node["NodeID"], reason, "spot", deadline_ms)
        assert accepted, why
        logs = [self._out / address / "two-nodes" / "sidecar.log" for address in self._addresses]
        _wait(lambda: all('"flush.finished"' in log.read_text() for log in logs))
        (self._out / "flushed").touch()

    def end(self) -> None:
        import ray

        ray.shutdown()
        if self._apart is not None:
            os.killpg(self._apart.pid, signal.SIGTERM)
            self._apart.wait(30)
        self._cluster.shutdown()
        for address in self._addresses:
            stop = "import keepstep_sidecar.cli.main as one; one.cli()"
            drive = str(self._out / address)
            subprocess.run([sys.executable, "-c", stop, "stop", "--dir", drive])


def main() -> None:
    out, settings = Path(sys.argv[1]).resolve(), json.loads(sys.argv[2])
    settings["out"] = str(out)
    if settings.get("bare"):
        return train(settings)
    # a node that was just lost counts until a start with it has failed
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "10"
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    faulthandler.dump_traceback_later(_WAIT_S)
    cluster = _Cluster(out, settings)
    try:
        ray.init(address=cluster.address, ignore_reinit_error=True)
        trainer = TorchTrainer(
            train,
            train_loop_config=settings,
            scaling_config=ScalingConfig(
                num_workers=(1, 2) if "lose" in settings else 2,
                elastic_resize_monitor_interval_s=1,
                resources_per_worker={"CPU": 1},
            ),
            run_config=RunConfig(
                name="two nodes",
                storage_path=settings.get("storage", str(out)),
                failure_config=FailureConfig(max_failures=0 if "shm" in settings else 3),
                checkpoint_config=CheckpointConfig(num_to_keep=4),
                worker_runtime_env=settings.get("runtime_env"),
            ),
        )
        done = _begin(trainer.fit)
        if "lose" in settings:
            cluster.lose()
            _wait(lambda: len((out / "lives").read_text().splitlines()) == 2)
            cluster.add()
        if "notice" in settings:
            cluster.announce()
        result = done.result()
        if result.checkpoint is not None:
            reported = [
                *(checkpoint for checkpoint, _ in result.best_checkpoints),
                result.checkpoint,
            ]
            (out / "reported").write_text(json.dumps([checkpoint.path for checkpoint in reported]))
    finally:
        cluster.end()


if __name__ == "__main__":
    main()

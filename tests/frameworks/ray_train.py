"""A training by Ray Train on two nodes, `python ray_train.py OUT SETTINGS` as in script.py: raylets
on this machine with an address and a directory each. Where `bare` is set, without Ray by torchrun.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NODES = ("127.0.0.2", "127.0.0.3")
_STEPS = 30


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    sys.argv = ["", config["out"], json.dumps(config)]
    import ray
    import ray.train
    import torch
    from ray.train.torch import prepare_model

    from keepstep.integrations.ray import checkpointer
    from tests.frameworks import script

    torch.manual_seed(script.RANK)
    layers = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    model: Any = torch.nn.Sequential(*layers)
    if config.get("bare"):
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept, begin = None, 0
    if not config.get("bare"):
        drive = Path(config["out"]) / ray.util.get_node_ip_address()
        kept = checkpointer({"model": model, "optimizer": optimizer}, dir=drive)
        if (at := kept.restore()) is not None:
            begin = at.step + 1
    for step in range(begin, _STEPS):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        script.maybe_kill(step)
        optimizer.step()
        script.record(step, loss)
        if kept is not None:
            kept.save(step)
    script.write({"model": script.digest(model.state_dict()), "random": script.random_states()})
    if kept is not None:
        kept.close()


def main() -> None:
    out, settings = str(Path(sys.argv[1]).resolve()), json.loads(sys.argv[2])
    if settings.get("bare"):
        return train({"out": out, **settings})
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    cluster = Cluster()
    try:
        for address in NODES:
            cluster.add_node(num_cpus=1, node_ip_address=address, include_dashboard=False)
        ray.init(address=cluster.address)
        TorchTrainer(
            train,
            train_loop_config={"out": out, **settings},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                name="two nodes", storage_path=out, failure_config=FailureConfig(max_failures=3)
            ),
        ).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()
        for address in NODES:
            stop = "import keepstep_sidecar.cli.main as one; one.cli()"
            subprocess.run([sys.executable, "-c", stop, "stop", "--dir", f"{out}/{address}"])


if __name__ == "__main__":
    main()

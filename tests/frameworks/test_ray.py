"""Ray Train on two nodes, of which one loses its worker: bit-equal at the end."""

from __future__ import annotations

import re
import subprocess

from tests.frameworks.conftest import assert_same, drawn


def test_ray_train_on_two_nodes_whose_worker_is_killed(lives, tmp_path):
    training = lives("ray_train.py")
    plain = training.undisturbed(ranks=2)
    kill = drawn(range(5, 25))
    done = subprocess.run(
        training.command("kept", {"kill": kill}, 1),
        cwd=tmp_path,
        env=training.variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    # the step before may still be on its way into memory
    said = rf"keepstep: restored step ({kill[0] - 1}|{kill[0] - 2}) of epoch 1"
    assert re.search(said, done.stdout), done.stdout[-5000:]
    assert_same(plain, tmp_path / "kept", kills=1, ranks=2)
    assert done.stdout.count("run 'two-nodes' stopped") == 2, "sidecars outlive the workers"

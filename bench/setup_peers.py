"""Install the peers that are not in the environment into `build/peers`, away from the pinned torch.

`python -m bench.setup_peers` takes about five minutes on two cores, most of it to compile
DeepSpeed's async_io. If that fails, a file in `build/peers` and the report say why.
"""

from __future__ import annotations

import os
import subprocess
import sys

from bench.peers import PEERS_DIR

_PACKAGES = (
    "torch-checkpointing==0.1.1",
    "lm-resiliency==0.2.0",
    "deepspeed==0.19.8",
    # needed to import deepspeed, which is installed without its dependency torch
    "hjson",
    "py-cpuinfo",
    "ninja",
    "einops",
    "tqdm",
    "msgpack",
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "annotated-types",
    "typing-inspection",
)
_BUILD = "from deepspeed.ops.op_builder import AsyncIOBuilder as b; b().load(verbose=False)"


def main() -> int:
    """Install the peers. Returns 0 even if DeepSpeed cannot be built: the report says so."""
    site, failed = PEERS_DIR / "site", PEERS_DIR / "deepspeed-failed.txt"
    site.mkdir(parents=True, exist_ok=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    subprocess.run([*install, "--target", str(site), *_PACKAGES], check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "PATH": f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(PEERS_DIR / "extensions"),
        "DS_ACCELERATOR": "cpu",
        "MAX_JOBS": str(max(1, len(os.sched_getaffinity(0)))),
    }
    built = subprocess.run(
        [sys.executable, "-c", _BUILD], env=environment, capture_output=True, text=True, check=False
    )
    failed.unlink(missing_ok=True)
    if built.returncode:
        failed.write_text(f"async_io does not build here: {built.stderr.strip()[-500:]}\n")
        print(failed.read_text(), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

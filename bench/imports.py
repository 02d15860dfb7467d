"""Measures what `import keepstep` adds to `import torch`, each in its own processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from bench.processes import environment

# A full collection is due soon after torch's objects, in whatever is imported next (80 ms).
_PROGRAM = """
import gc, time, json
begun = time.perf_counter()
import torch
torch_s = time.perf_counter() - begun
gc.collect()
begun = time.perf_counter()
import keepstep
package_s = time.perf_counter() - begun
keepstep.Checkpointer
print(json.dumps([torch_s, package_s, time.perf_counter() - begun]))
"""


def measure(*_: object, repeats: int = 5) -> dict[str, float]:
    """Seconds to import torch alone, keepstep after it, and keepstep with its `Checkpointer`."""
    command = [sys.executable, "-c", _PROGRAM]
    outputs = [subprocess.check_output(command, env=environment()) for _ in range(repeats + 1)]
    rows = [json.loads(chunk) for chunk in outputs]
    torch_s, package_s, whole_s = (
        statistics.median(column) for column in zip(*rows[1:], strict=True)
    )
    return {"import_torch_s": torch_s, "import_package_s": package_s, "import_keepstep_s": whole_s}

"""Joins the samples of several runs of one machine and commit into one report.

`python -m bench.merge NAME A.json B.json ...` is for sizes that do not fit into the time of one
run. Floors are pooled like all other samples, so each median has floors of the same runs beside it.
If a subject failed at a size in one run and another run measured it, the failure is left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.__main__ import ROOT, rounds_of, write
from bench.results import Results, Sample


def merge(reports: list[dict[str, Any]]) -> tuple[Results, dict[str, str]]:
    """All samples, and the machine with every run's command. Raises ValueError if the reports are
    of different machines."""
    machines = [report["machine"] for report in reports]
    for fixed in ("processor", "kernel", "torch", "python"):
        if len({machine[fixed] for machine in machines}) > 1:
            raise ValueError(f"not one machine: {fixed} differs")
    results = Results()
    for number, report in enumerate(reports):
        for one in report["samples"]:
            # keep rounds of different runs apart
            results.samples.append(Sample(**{**one, "round": 100 * number + one["round"]}))
    measured = {_what(one) for one in results.samples if not one.missing}
    results.samples = [
        one for one in results.samples if not one.missing or _what(one) not in measured
    ]
    described: dict[str, str] = dict(machines[0])
    for key in ("command", "took", "load before"):
        described[key] = "; ".join(machine[key] for machine in machines)
    described["rounds"] = rounds_of(results)
    return results, described


def _what(one: Sample) -> tuple[str, int, bool]:
    return one.subject, one.size_bytes, one.huge_pages


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.merge", description=__doc__)
    parser.add_argument("name", help="of the joined report in bench/results")
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--main", type=int, default=2048, metavar="MIB", help="size of the bars")
    options = parser.parse_args()
    results, described = merge([json.loads(path.read_text()) for path in options.reports])
    write(results, described, options.main << 20, ROOT / "bench" / "results", options.name)


if __name__ == "__main__":
    main()

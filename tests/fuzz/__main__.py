"""`make fuzz MINUTES=5`: fuzz every parser, and add the counts to docs/fuzz.json.

    python -m tests.fuzz --minutes 5 [--seed N] [--only NAME]

The seed of a run is printed and stands in the results; the same seed gives the same mutations, as
many of them as there is time for. What goes wrong becomes a file in attacks/, and the exit status.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import secrets
import subprocess
import time
from dataclasses import asdict
from typing import Any

from tests.fuzz.campaign import Campaign, Tally, save
from tests.fuzz.targets import targets

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "fuzz.json"
COMMAND = "make fuzz MINUTES=5"
_PRINT_EVERY_S = 10.0
_MOST_FILES = 20
_MOST_BYTES = 8 << 30


def main() -> int:
    """The exit status: 1 when anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--only", default="", help="part of a target's name")
    options = parser.parse_args()
    # what takes memory without end shall fail here, and not take the machine with it
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    chosen = [target for target in targets() if options.only in target.name]
    campaign = Campaign(seed=options.seed, targets=chosen)
    print(f"seed {options.seed}: {len(chosen)} parsers for {options.minutes:g} minutes", flush=True)
    began, printed = time.monotonic(), time.monotonic()

    def goes_on() -> bool:
        nonlocal printed
        if time.monotonic() - printed >= _PRINT_EVERY_S:
            printed = time.monotonic()
            print(
                f"{printed - began:6.0f} s  {campaign.mutations:8d} mutations, {campaign.bad} bad"
            )
            for target, what, _ in campaign.found[-3:]:
                print(f"          {target.name}: {what[:150]}", flush=True)
        return time.monotonic() - began < options.minutes * 60

    campaign.run(goes_on)
    for target, what, data in campaign.found[:_MOST_FILES]:
        print(f"{target.name}: {what}\n    {save(target, what, data, ROOT / 'attacks')}")
    for name, tally in sorted(campaign.tallies.items()):
        print(f"{name:24} {tally.mutations:8d}, {tally.accepted} accepted, {tally.bad} bad,"
              f" {tally.slowest_ms} ms, {tally.most_mib} MiB")  # fmt: skip
    if not options.only:
        _add(campaign, minutes=options.minutes)
    print(f"seed {options.seed}: {campaign.mutations} mutations, {campaign.bad} bad")
    return 1 if campaign.bad else 0


def _add(campaign: Campaign, *, minutes: float) -> None:
    """Put this run's counts to those of the runs before; of one that found something, what that
    was, and no counts: they are of code that was changed since."""
    counts: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    tallies = {name: Tally(**parser) for name, parser in counts.get("parsers", {}).items()}
    for name, tally in () if campaign.bad else campaign.tallies.items():
        tallies.setdefault(name, Tally()).add(tally)
    run: dict[str, Any] = {
        "seed": campaign.seed,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "-suno") else ""),
        "minutes": minutes,
        "mutations": campaign.mutations,
        "bad": campaign.bad,
        "found": [
            f"{target.name}: {what:.200}" for target, what, _ in campaign.found[:_MOST_FILES]
        ],
    }
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    body = {
        "command": COMMAND,
        "total": asdict(total),
        "parsers": {name: asdict(tally) for name, tally in sorted(tallies.items())},
        "runs": [*counts.get("runs", []), run],
    }
    RESULTS.write_text(json.dumps(body, indent=1) + "\n")


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())

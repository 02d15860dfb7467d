"""torchvision beside a torch for CPUs: to be imported first.

The package index has torchvision for CUDA alone, whose operators do not load there. Its Python part
needs the schemas of two of them to be imported; ultralytics calls one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

# Not in the environment itself: transformers imports torchvision wherever it finds one.
sys.path.append(str(Path(sys.prefix) / "vision"))
for name, more in (("nms", ""), ("qnms", ", bool exact")):
    arguments = f"Tensor dets, Tensor scores, float iou_threshold{more}"
    torch.library.define(f"torchvision::{name}", f"({arguments}) -> Tensor")

import torchvision  # noqa: E402


def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    left, kept = scores.argsort(descending=True), [scores.new_empty(0, dtype=torch.long)]
    while len(left):
        kept.append(left[:1])
        overlaps = torchvision.ops.box_iou(boxes[left[:1]], boxes[left[1:]])[0]
        left = left[1:][overlaps <= threshold]
    return torch.cat(kept)


torchvision.ops.nms = nms

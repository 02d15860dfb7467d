"""torchvision and ultralytics beside a torch for CPUs, without a network: to be imported first.

The package index has torchvision for CUDA alone, whose operators do not load there. Its Python part
needs the schemas of two of them to be imported; ultralytics calls one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

# not in the environment itself: transformers imports torchvision wherever it finds one
VISION = Path(sys.prefix) / "vision"
sys.path.append(str(VISION))
os.environ.update(YOLO_OFFLINE="true", YOLO_AUTOINSTALL="false", YOLO_CONFIG_DIR=str(VISION))
(VISION / "Ultralytics").mkdir(exist_ok=True)
(VISION / "Ultralytics" / "Arial.ttf").touch()  # else ultralytics asks for it
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

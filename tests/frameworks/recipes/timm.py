"""What timm's script starts from, small."""

from __future__ import annotations

from typing import Any

import timm
import torch
from PIL import Image
from timm.data import Mixup, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch.utils.data import Dataset

from tests.frameworks.script import SETTINGS, maybe_kill, watch

COMPARED = ("model", "model_ema", "optimizer", "lr_scheduler", "best_metric")


class Images(Dataset[Any]):
    transform: Any = None  # set by create_loader

    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        drawn = torch.randint(0, 256, (40, 40, 3), generator=torch.Generator().manual_seed(at))
        return self.transform(Image.fromarray(drawn.byte().numpy())), at % 4


def made() -> dict[str, Any]:
    model = timm.create_model("test_resnet", num_classes=4, drop_rate=0.1)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
    watch(optimizer)
    scheduler, epochs = create_scheduler_v2(
        optimizer, num_epochs=3, warmup_epochs=1, updates_per_epoch=6, step_on_epochs=False
    )
    options: dict[str, Any] = {"num_workers": 0, "use_prefetcher": False, "auto_augment": "rand-m5"}
    if SETTINGS.get("prefetch"):
        options = {"num_workers": 1, "use_prefetcher": True, "no_aug": True}
    options["persistent_workers"] = options["num_workers"] > 0
    loader = create_loader(
        Images(), input_size=(3, 32, 32), batch_size=4, is_training=True,
        device=torch.device("cpu"), **options,
    )  # fmt: skip
    seen = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def validate(net: Any) -> float:
        maybe_kill(-1)
        return float(net.module(seen).mean())

    return {
        "model": model,
        "model_ema": ModelEmaV3(model, decay=0.9, use_warmup=True),
        "optimizer": optimizer,
        "lr_scheduler": scheduler,
        "loader_train": loader,
        "mixup_fn": Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=4),
        "train_loss_fn": SoftTargetCrossEntropy(),
        "validate": validate,
        "best_metric": -1.0,
        "start_epoch": 0,
        "num_epochs": epochs,
    }

"""What a script of diffusers' starts from, small."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from torch.utils.data import DataLoader, Dataset

from tests.frameworks.script import SETTINGS, watch

COMPARED = ("unet", "ema_unet", "optimizer", "lr_scheduler")


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 18

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(at)
        pixels = torch.randn(3, 16, 16, generator=drawn)
        return {"pixel_values": pixels, "input_ids": torch.randint(0, 9, (4,), generator=drawn)}


def made() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    vae = AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=16
    )
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8, attention_head_dim=4, dropout=0.1,
    )  # fmt: skip
    if SETTINGS.get("lora"):
        unet.requires_grad_(False)
        unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    trainable = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    watch(optimizer)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=10)
    loader = DataLoader(Images(), shuffle=True, batch_size=2)
    prepared = accelerator.prepare(unet, optimizer, loader, scheduler)
    names = ("unet", "optimizer", "train_dataloader", "lr_scheduler")
    return {
        **dict(zip(names, prepared, strict=True)),
        "torch": torch,
        "accelerator": accelerator,
        "vae": vae.requires_grad_(False),
        "text_encoder": torch.nn.Embedding(9, 8).requires_grad_(False),
        "noise_scheduler": DDPMScheduler(1000),
        "trainable": trainable,
        "ema_unet": EMAModel(trainable),
        "first_epoch": 0,
        "num_train_epochs": 2,
        "max_train_steps": 10,
    }

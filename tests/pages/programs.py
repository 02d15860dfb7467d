"""Makes programs of the Python blocks of the pages: what a page leaves to its reader, the block as
it stands there, and a line that tells how far it came."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from tests.pages.blocks import FRAMEWORKS, Block

HEAD = """
import torch
import keepstep

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)


class Data(torch.utils.data.Dataset):
    read = 0

    def __len__(self):
        return 8

    def __getitem__(self, at):
        Data.read += 1
        return torch.tensor(float(at))

loader = torch.utils.data.DataLoader(Data(), batch_size=2, shuffle=True)
first, steps, epochs = 0, 4, 2
"""

ROWS = """
from transformers import TrainingArguments

args = TrainingArguments("out", num_train_epochs=1, report_to=[], use_cpu=True)

class Rows(torch.utils.data.Dataset):
    read = 0

    def __len__(self):
        return 4

    def __getitem__(self, at):
        Rows.read += 1
        return {"x": torch.ones(4) * at}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).mean()}
"""
LORA = [f"base_model.model.layer.lora_{part}.weight" for part in "AB"]


@dataclass(frozen=True)
class Program:
    """`before` and `after` the block. `printed`: its last line in a first and in a second
    life."""

    before: str = ""
    after: str = "print(at and at.step)"
    printed: tuple[str, str] = ("None", "3")


def check(program: Program, block: Block, home: Path, python: str) -> None:
    """Run it in two lives, in this directory."""
    text = f"{HEAD}{program.before}\n{block.text}\n{program.after}\n"
    (home / "page.py").write_text(text)
    for message in program.printed:
        done = subprocess.run(
            [python, "page.py"], cwd=home, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert message in done.stdout.splitlines(), done.stdout + done.stderr


PAGE = "docs/add-keepstep.md"
DCP = f"{PAGE} `torch.distributed.checkpoint`"
LOADER = f"{PAGE} Where the data loader stands"
PROGRAMS = {
    "README.md Ten lines": Program(),
    f"{PAGE} Add keepstep to a training script": Program(
        before="def batch(number):\n    return (torch.full((2, 4), float(number)),)"
    ),
    f"{PAGE} Models that change": Program(
        before="""
UNFREEZE_AT = 2
head = torch.nn.Linear(4, 4).requires_grad_(False)
model = torch.nn.Sequential(model, head)
components = {"model": model, "optimizer": optimizer}

def unfreeze(model, optimizer):
    if len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": list(head.requires_grad_(True).parameters())})
""",
        after="print(at and at.step, len(optimizer.param_groups))",
        printed=("None 2", "3 2"),
    ),
    DCP: Program(
        before="""
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

steps = 201

class AppState:
    def __init__(self, model, optimizer):
        self.of = model, optimizer

    def state_dict(self):
        return dict(zip(["model", "optimizer"], get_state_dict(*self.of)))

    def load_state_dict(self, state):
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(*self.of, model_state_dict=model, optim_state_dict=optimizer)

def train_one_step():
    with torch.no_grad():
        model.weight.fill_(step)
""",
        after="print(first, float(model.weight[0, 0]))",
        printed=("0 200.0", "201 200.0"),
    ),
    f"{DCP} 2": Program(
        before="""
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import keepstep.dcp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
state, latest = {"model": model}, keepstep.dcp.latest_step()
if latest is not None:
    dcp.load(state, storage_reader=keepstep.dcp.StorageReader())
step = 3 if latest is None else latest + 1
""",
        after="future.result()\nkeepstep.dcp.close()\ndist.destroy_process_group()\nprint(step)",
        printed=("3", "4"),
    ),
    LOADER: Program(
        before="""
class Loader:
    at = 0

    def __iter__(self):
        while self.at < 4:
            self.at += 1
            yield torch.rand(1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

loader = Loader()
""",
        after="print(at and at.step, loader.at)\ncheckpointer.save(5)\ncheckpointer.close()",
        printed=("None 4", "5 4"),
    ),
    f"{LOADER} 2": Program(
        before="def train_one(batch):\n    model(batch.repeat(2)).sum().backward()",
        after="print(at and at.step)\ncheckpointer.close()",
        printed=("None", "7"),
    ),
    f"{PAGE} Accumulation, scaler, compile": Program(
        after="""
at = checkpointer.restore()
checkpointer.save(3 if at is None else 4)
checkpointer.close()
print(at and at.step)
""",
    ),
    f"{PAGE} Code that changes weights": Program(
        before="""
checkpointer = keepstep.Checkpointer(model=model, optimizer=optimizer)
at = checkpointer.restore()
first = 1000 if at else 0
steps = first + 4

def prune(model):
    model.weight.data[0] = first
""",
        after="print(at and at.step, float(model.weight[0, 0]))",
        printed=("None 0.0", "3 1000.0"),
    ),
    f"{PAGE} Waiting for a step": Program(
        before="""
checkpointer = keepstep.Checkpointer(model=model, optimizer=optimizer)
at = checkpointer.restore()
step, published = 3, []
publish = published.append
if at:
    step = at.step + 1
""",
        after="print(published, checkpointer.latest_step())",
        printed=("[3] 3", "[4] 4"),
    ),
    f"{FRAMEWORKS} What cannot be bit-equal": Program(
        before="class Rows:\n    seed = 1",
        after="__getitem__(Rows(), 3)\nRows.__getitem__ = __getitem__\nprint(Rows()[3])",
        printed=("None", "None"),
    ),
}
"""In the environment of `make test`."""

EPOCHS = Program(after="print(step, Data.read)", printed=("8 16", "8 0"))
IN_FRAMEWORKS = {
    f"{FRAMEWORKS} Several trainings in one process": Program(
        before=f"""{ROWS}
import transformers
from keepstep.integrations.transformers import attach

class Trainer(transformers.Trainer):
    def __init__(self, _):
        super().__init__(Net(), args, train_dataset=Rows())
""",
        after="print(Rows.read, trainer.state.global_step)",
        printed=("20 1", "0 1"),
    ),
    f"{FRAMEWORKS} LoRA and frozen models": Program(
        before=f"""{ROWS}
import peft
from transformers import Trainer as SFTTrainer
from keepstep.integrations.transformers import KeepstepTrainerMixin

model = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["layer"]))
""",
        after="""
tuner = Tuner(model=model, args=args, train_dataset=Rows())
tuner.train()
print(sorted(tuner.keepstep_components()["model"].state_dict()), Rows.read)
""",
        printed=(f"{LORA} 4", f"{LORA} 0"),
    ),
    f"{FRAMEWORKS} Trainer": Program(
        before=f"""{ROWS}
from transformers import Trainer

model, dataset = Net(), Rows()
""",
        after="print(Rows.read, trainer.state.global_step)",
        printed=("4 1", "0 1"),
    ),
    f"{FRAMEWORKS} Lightning": Program(
        before="""
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

class Model(LightningModule):
    def training_step(self, batch):
        return self.layer(batch.repeat(2)).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Rows(LightningDataModule):
    def train_dataloader(self):
        return loader

net, model, data = model, Model(), Rows()
model.layer = net
""",
        after="print(trainer.global_step, Data.read)",
        printed=("12 24", "12 0"),
    ),
    f"{FRAMEWORKS} A loop of your own on Fabric": replace(
        EPOCHS, before="from lightning.fabric import Fabric\nfabric = Fabric(accelerator='cpu')"
    ),
    f"{FRAMEWORKS} A loop of your own on accelerate": replace(
        EPOCHS, before="from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)"
    ),
    f"{FRAMEWORKS} PyTorch-Ignite": Program(
        before="""
from ignite.engine import Engine, Events

def update(engine, batch):
    return model(batch.repeat(2)).sum().item()
""",
        after="print(trainer.state.iteration, Data.read)",
        printed=("8 16", "8 0"),
    ),
    f"{FRAMEWORKS} Restores in W&B, TensorBoard and MLflow": Program(
        before="""
import wandb

wandb.init(mode="offline", dir=".")
checkpointer = keepstep.Checkpointer(model=model, optimizer=optimizer)
""",
        after="""
checkpointer.save(at.step + 1 if at else 3)
checkpointer.close()
print(at and at.step)
""",
    ),
}
"""In the environment of `make test-frameworks`."""

"""The lines of docs/frameworks.md that can run on CPU: each trains over sdma as over gloo.

FSDP2 has test_demo.py, DeepSpeed test_deepspeed.py. What torch does not bring is for
`make nightly`, which installs it.
"""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pg_sdma

STEPS = 4
HOST = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # as torchrun sets them


def needs(name: str) -> None:
    if find_spec(name) is None:
        pytest.fail(f"{name} is not installed: run `make .venv/.frameworks`, then again")


def model_and_data() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The same model on every rank, and this rank's inputs and targets, one row a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    torch.manual_seed(1 + int(os.environ["RANK"]))
    return model, torch.randn(STEPS, 64), torch.randn(STEPS, 64)


def routes() -> set[str]:
    """By which routes the default group's all-gathers went."""
    return {route for by_route in pg_sdma.stats().values() for route in by_route}


def train(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        loss = nn.functional.mse_loss(model(x[None]), y[None])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp():
    from torch.nn.parallel import DistributedDataParallel

    model, *data = model_and_data()
    return train(DistributedDataParallel(model), *data), routes()


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, *data = model_and_data()
    result = train(FullyShardedDataParallel(model, device_id=torch.device("cpu")), *data), routes()
    dist.barrier()
    return result


def run_both(function, *args, timeout=60.0):
    """What the ranks of a gloo and of an sdma group return; their losses are the same bits."""
    inners, ours = (
        run_ranks(2, function, *args, backend=backend, env=HOST, timeout=timeout)
        for backend in ("cpu:gloo", "cpu:sdma")
    )
    check(inners, ours)
    return ours


def check(inners, ours) -> None:
    for (inner_losses, inner_routes), (losses, _) in zip(inners, ours, strict=True):
        assert losses == inner_losses
        assert len(set(losses)) == STEPS
        assert not inner_routes


def test_ddp():
    """It gathers nothing after its start: all its traffic is the inner's."""
    run_both(ddp)


def test_fsdp1():
    for _, by_route in run_both(fsdp1):
        assert by_route == {"direct"}


def accelerate():
    from accelerate import Accelerator

    model, inputs, targets = model_and_data()
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Each rank has its own data already.
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).sum().item())
    return losses, routes()


@pytest.mark.nightly
def test_accelerate():
    needs("accelerate")
    for _, by_route in run_both(accelerate, timeout=200):
        assert by_route == {"direct"}


def lightning(backend, port):
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    model, inputs, targets = model_and_data()
    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            x, y = batch
            loss = nn.functional.mse_loss(self.model(x), y)
            losses.append(self.all_gather(loss.detach()).sum().item())
            self.log("loss", loss, sync_dist=True)  # by ReduceOp.AVG, where gloo is not named so
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    os.environ["MASTER_PORT"] = str(port)
    strategy = DDPStrategy(
        process_group_backend=backend, cluster_environment=TorchElasticEnvironment()
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(inputs, targets), batch_size=1))
    assert dist.get_backend() == backend
    return losses, routes()


@pytest.mark.nightly
def test_lightning():
    needs("lightning")
    inners, ours = (
        run_ranks(
            2,
            lightning,
            *(backend, free_port()),
            backend=None,
            env=HOST,
            timeout=200,
        )
        for backend in ("cpu:gloo", "cpu:sdma")
    )
    check(inners, ours)
    assert all(by_route == {"direct"} for _, by_route in ours)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def hf_trainer(folder):
    import transformers

    model, inputs, targets = model_and_data()
    losses = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            loss = nn.functional.mse_loss(self.model(x), y)
            losses.append(loss.item())
            return {"loss": loss}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            rows = [{"x": x, "y": y} for x, y in zip(inputs, targets, strict=True)]
            return DataLoader(rows, batch_size=1)

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_grad_norm=0,
        learning_rate=1e-2,
    )
    assert arguments.world_size == 2
    Trainer(model=Model(), args=arguments).train()
    return losses, routes()


@pytest.mark.nightly
def test_hugging_face_trainer(tmp_path):
    needs("transformers")
    needs("accelerate")
    run_both(hf_trainer, str(tmp_path), timeout=200)

"""Imported on ranks alone, because importing Lightning takes seconds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from benchmarks.wire import WireBytes
from dcp_fsdp_osd.trainers.lightning import FlatFSDPStrategy, FlatModelParallelStrategy

WIDTH, ROWS = 60, 12


class Ranks(ClusterEnvironment):
    """The process group that is there already."""

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Net(lightning.LightningModule):
    """Batches are a function of the step, cut by rank."""

    def __init__(self, seed: int, fsdp2: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 301), nn.Tanh(), nn.Linear(301, 7))
        self.mean = torchmetrics.MeanMetric()  # has a state_dict of its own
        self.fsdp2 = fsdp2
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.fsdp2:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        data = torch.Generator().manual_seed(1000 + self.global_step)
        rows = torch.randn(ROWS, WIDTH, generator=data)
        loss = self.layers(rows.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
        self.mean(loss.detach())
        total = loss.detach().double() / dist.get_world_size()
        dist.all_reduce(total)
        self.losses.append(total.item())
        return loss

    def configure_optimizers(self) -> Any:
        optim = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 2, gamma=0.5)
        return {
            "optimizer": optim,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def _wrapped(strategy: FSDPStrategy, model: nn.Module) -> nn.Module:
    """What ``FSDPStrategy._setup_model`` makes, where there is no accelerator: that one names the
    device by its index, which the CPU has not."""
    return FSDP(model, device_id=torch.device("cpu"), **strategy.kwargs)


class OnCpu(FlatFSDPStrategy):
    _setup_model = _wrapped


class StockOnCpu(FSDPStrategy):
    _setup_model = _wrapped


def fit(
    strategy: Strategy, steps: int, *, seed: int = 2, load: Any = None, save: Any = None
) -> tuple[list[float], lightning.Trainer]:
    """Losses of the steps that are made here; saved every 3 steps below `save`."""
    callbacks: list[Any] = []
    if save is not None:
        kept: dict[str, Any] = {"save_top_k": -1, "filename": "{step}", "every_n_train_steps": 3}
        callbacks.append(ModelCheckpoint(save, **kept))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[Ranks()],
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=save is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = Net(seed, isinstance(strategy, ModelParallelStrategy))
    loader = torch.utils.data.DataLoader(torch.zeros(100, 1))
    trainer.fit(model, loader, ckpt_path=load)
    return model.losses, trainer


def fsdp1(**options: Any) -> FlatFSDPStrategy:
    return OnCpu(auto_wrap_policy={nn.Linear}, **options)


def stock1() -> FSDPStrategy:
    return StockOnCpu(auto_wrap_policy={nn.Linear}, state_dict_type="sharded")


def sizes(kind: type[Strategy]) -> Strategy:
    return kind(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


def sent(trainer: lightning.Trainer, path: Path) -> int:
    with WireBytes() as wire:
        trainer.save_checkpoint(path)
    return int(wire.tensors)


def _refused(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def first(folder: Path) -> dict[str, Any]:
    """FSDP1: saved by ours, resumed by ours and by Lightning's own strategy; what is refused."""
    warnings.filterwarnings("ignore")
    found: dict[str, Any] = {}
    found["ours"], ours = fit(fsdp1(), 6, seed=1, save=folder / "ours")
    saved = folder / "ours" / "step=3.ckpt"
    found["ours from ours"], trainer = fit(fsdp1(), 6, load=saved)
    found["schedule"] = trainer.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"]
    found["stock from ours"], stock = fit(stock1(), 6, load=saved)
    found["sent"] = sent(ours, folder / "again.ckpt"), sent(stock, folder / "stock.ckpt")

    checkpoint = {"state_dict": ours.strategy.lightning_module_state_dict()}
    unsaved = folder / "unsaved.ckpt"
    bad = {**checkpoint, "callbacks": lambda: None}  # pickled on rank 0 alone
    found["errors"] = [
        _refused(lambda: ours.strategy.save_checkpoint(bad, unsaved)),
        _refused(lambda: ours.strategy.load_checkpoint(folder / "nothing")),
        _refused(lambda: ours.strategy.save_checkpoint(checkpoint, unsaved, {"a": 1})),
        _refused(lambda: FlatFSDPStrategy(state_dict_type="full")),
        _refused(lambda: FlatModelParallelStrategy(save_distributed_checkpoint=False)),
    ]
    return found


def more(folder: Path, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """FSDP1 from Lightning's own checkpoint, and to S3 and back."""
    warnings.filterwarnings("ignore")
    found: dict[str, Any] = {}
    found["stock"], _ = fit(stock1(), 6, seed=1, save=folder / "stock")
    found["ours from stock"], _ = fit(fsdp1(), 6, load=folder / "stock" / "step=3.ckpt")
    storage = {"storage_options": options}
    strategy = fsdp1(writer_options=storage, reader_options=storage)
    found["ours"], ours = fit(strategy, 8, seed=1, save=folder / "ours")
    ours.save_checkpoint(f"{url}/eight.ckpt")
    strategy = fsdp1(reader_options=storage)
    found["from S3"], _ = fit(strategy, 10, load=f"{url}/eight.ckpt")
    found["from disk"], local = fit(fsdp1(), 8, load=folder / "ours" / "step=6.ckpt")
    local.save_checkpoint(folder / "eight.ckpt")
    found["further"], _ = fit(fsdp1(), 10, load=folder / "eight.ckpt")
    return found


def second(folder: Path) -> dict[str, Any]:
    """FSDP2."""
    warnings.filterwarnings("ignore")
    found: dict[str, Any] = {}
    found["ours"], _ = fit(sizes(FlatModelParallelStrategy), 6, seed=1, save=folder / "fsdp2")
    saved = folder / "fsdp2" / "step=3.ckpt"
    found["ours from ours"], _ = fit(sizes(FlatModelParallelStrategy), 6, load=saved)
    found["stock from ours"], _ = fit(sizes(ModelParallelStrategy), 6, load=saved)
    found["before"], _ = fit(fsdp1(), 6, seed=1, save=folder / "fsdp1")
    flat = folder / "fsdp1" / "step=3.ckpt"
    found["from FSDP1"], _ = fit(sizes(FlatModelParallelStrategy), 6, load=flat)
    return found


def resumed(folder: Path) -> list[float]:
    """FSDP1 on other ranks."""
    warnings.filterwarnings("ignore")
    return fit(fsdp1(), 6, load=folder / "ours" / "step=3.ckpt")[0]

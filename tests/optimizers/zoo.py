"""Real optimizers by name, each made by its package's public constructor, and models for them.

A model's parameters are *numbered*: every element is a number of its own, :data:`STRIDE` times its
parameter's plus its place in it.  So a piece of a parameter says by itself which elements of which
FQN it is made of, however it was wrapped and cut, and no gather need be trusted to know.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.models import Transformer, inner, wrap_blocks, wrap_fsdp1

__all__ = ["LAYOUTS", "MODELS", "STRIDE", "ZOO", "Entry", "build", "local", "train"]

STRIDE = 1024
"""More than any parameter here has elements."""

Make = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Entry:
    """One optimizer.

    Attributes:
        make: the optimizer of a (wrapped) model.
        package: the package or module that it comes from; None for any torch.
        model: which of :data:`MODELS` it trains.
        unrunnable: layouts under which it fails in a way that leaves other ranks waiting.
        rounds: whether it multiplies by matrices that lie column by column in memory. DCP keeps
            values, not strides: after a load into an empty dict the next step may round otherwise.
        counts_with_first: whether its step is counted in the state of each rank's first parameter.
            A load gives the count to all ranks that share that parameter, where it is not used.
    """

    make: Make
    package: str | None = None
    model: str = "uneven"
    unrunnable: tuple[str, ...] = ()
    rounds: bool = False
    counts_with_first: bool = False

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


def _torch(name: str, **options: Any) -> Entry:
    return Entry(
        lambda model: getattr(torch.optim, name)(model.parameters(), **{"lr": 0.01, **options}),
        model="even" if name == "LBFGS" else "uneven",
    )


def _muon(model: nn.Module) -> Any:  # it takes matrices alone
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)


def _collection(name: str, *, rounds: bool = False, **options: Any) -> Entry:
    def make(model: nn.Module) -> Any:
        import pytorch_optimizer

        cls = getattr(pytorch_optimizer, name)
        return cls(model.parameters(), **{"lr": 0.01, **options})

    return Entry(make, "pytorch_optimizer", rounds=rounds)


def _heavyball(name: str, *, rounds: bool = False) -> Entry:
    def make(model: nn.Module) -> Any:
        import heavyball
        import heavyball.utils

        heavyball.utils.compile_mode = None  # compiling takes minutes
        heavyball.utils.compile_mode_recommended_to_none = None
        return getattr(heavyball, name)(model.parameters(), lr=0.01)

    return Entry(make, "heavyball", rounds=rounds, counts_with_first=True)


def _schedulefree(name: str) -> Entry:
    def make(model: nn.Module) -> Any:
        import schedulefree

        optim = getattr(schedulefree, name)(model.parameters(), lr=0.01)
        optim.train()
        return optim

    return Entry(make, "schedulefree")


def _adam_mini(model: nn.Module) -> Any:
    from adam_mini import Adam_mini

    return Adam_mini(model.named_parameters(), lr=0.01, dim=16, n_heads=2, verbose=False)


def _transformers_adafactor(model: nn.Module) -> Any:
    from transformers import Adafactor

    return Adafactor(model.parameters(), lr=0.01, relative_step=False, beta1=0.9)


def _came(model: nn.Module) -> Any:
    from came_pytorch import CAME

    return CAME(model.parameters(), lr=0.01)


def _prodigy(model: nn.Module) -> Any:
    from prodigyopt import Prodigy

    return Prodigy(model.parameters(), lr=1.0)


def _adamw_of_adapters(model: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


ZOO: dict[str, Entry] = {
    "torch SGD, momentum": _torch("SGD", momentum=0.9),
    "torch Adam": _torch("Adam"),
    "torch AdamW, amsgrad": _torch("AdamW", amsgrad=True),
    "torch AdamW, fused": _torch("AdamW", fused=True),
    "torch Adamax": _torch("Adamax"),
    "torch NAdam": _torch("NAdam"),
    "torch RAdam": _torch("RAdam"),
    "torch Adagrad": _torch("Adagrad"),
    "torch Adadelta": _torch("Adadelta"),
    "torch RMSprop": _torch("RMSprop", momentum=0.9, centered=True),
    "torch Rprop": _torch("Rprop"),
    "torch ASGD": _torch("ASGD"),
    "torch Adafactor": _torch("Adafactor"),
    "torch LBFGS": _torch(
        "LBFGS", max_iter=3, history_size=2, tolerance_grad=0.0, tolerance_change=0.0
    ),
    "torch Muon": Entry(_muon, "torch.optim._muon"),  # since torch 2.9
    "PEFT LoRA, torch AdamW": Entry(_adamw_of_adapters, "peft", "lora", unrunnable=("FSDP1 flat",)),
    "schedulefree AdamW": _schedulefree("AdamWScheduleFree"),
    "schedulefree SGD": _schedulefree("SGDScheduleFree"),
    "schedulefree RAdam": _schedulefree("RAdamScheduleFree"),
    "adam-mini": Entry(_adam_mini, "adam_mini", "llama", unrunnable=("FSDP1",)),
    "transformers Adafactor": Entry(_transformers_adafactor, "transformers"),
    "CAME": Entry(_came, "came_pytorch"),
    "Prodigy": Entry(_prodigy, "prodigyopt", "even"),
    "heavyball AdamW": _heavyball("AdamW"),
    "heavyball ADOPT": _heavyball("ADOPT"),
    "heavyball Muon": _heavyball("Muon"),
    "heavyball SOAP": _heavyball("SOAP", rounds=True),
    "heavyball PSGDKron": _heavyball("PSGDKron"),
    "pytorch_optimizer Lion": _collection("Lion"),
    "pytorch_optimizer Lamb": _collection("Lamb", foreach=False),
    "pytorch_optimizer NovoGrad": _collection("NovoGrad", foreach=False),
    "pytorch_optimizer Adan": _collection("Adan", foreach=False),
    "pytorch_optimizer AdEMAMix": _collection("AdEMAMix"),
    "pytorch_optimizer SM3": _collection("SM3", foreach=False),
    "pytorch_optimizer Shampoo": _collection("Shampoo", preconditioning_compute_steps=1),
    "pytorch_optimizer ScalableShampoo": _collection(
        "ScalableShampoo", block_size=4, start_preconditioning_step=1
    ),
    "pytorch_optimizer SOAP": _collection("SOAP", precondition_frequency=1, rounds=True),
    "pytorch_optimizer Kron": _collection("Kron"),
}


# ---------------------------------------------------------------- models


def _llama() -> nn.Module:
    """A Llama of Hugging Face's, from a config alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=29,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            attn_implementation="eager",
        )
    )


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "uneven": lambda: Transformer(words=7, depth=1),
    "even": lambda: Transformer(words=8, depth=1),
    "llama": _llama,
    "lora": _lora,
}
"""``uneven`` has a dimension of 7, which no world here divides; ``even`` suits every world."""


def _units(model: nn.Module) -> list[nn.Module]:
    """The modules that are units of FSDP's beside the root."""
    names = ("_Layer", "Block", "LlamaDecoderLayer")
    return [module for module in model.modules() if type(module).__name__ in names]


def _fsdp1(model: nn.Module, *, use_orig_params: bool) -> nn.Module:
    policy = wrap_blocks(*{type(module) for module in _units(model)})
    return wrap_fsdp1(model, policy=policy, use_orig_params=use_orig_params)


def _fsdp2(model: nn.Module) -> nn.Module:
    for module in reversed(_units(model)):  # inner ones first
        fully_shard(module)
    fully_shard(model)
    return model


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "FSDP1": lambda model: _fsdp1(model, use_orig_params=True),
    "FSDP1 flat": lambda model: _fsdp1(model, use_orig_params=False),
    "FSDP2": _fsdp2,
    "DDP": DistributedDataParallel,
    "one process": lambda model: model,
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build(layout: str, model: str) -> tuple[nn.Module, dict[nn.Parameter, torch.Tensor]]:
    """A wrapped model, and for each of its parameters the numbers of this rank's elements.

    What is no element (FSDP's padding) has a number below :data:`STRIDE`.  The weights are a
    function of their numbers, so the same under every layout.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = MODELS[model]()
    for number, param in enumerate(module.parameters(), 1):
        param.detach().copy_((torch.arange(param.numel()) + STRIDE * number).view(param.shape))
    wrapped = LAYOUTS[layout](module)
    numbers = {param: local(param).detach().clone() for param in wrapped.parameters()}
    for param in wrapped.parameters():
        local(param.detach()).copy_(local(param.detach()).sin() * 0.3)
    if layout == "DDP":  # it adds up gradients in another order in its very first step
        train("", wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.0), 1)
    return wrapped, numbers


def train(
    name: str, model: nn.Module, optim: torch.optim.Optimizer, steps: int, first: int = 0
) -> list[float]:
    """Train; the data and every random state are a function of the step and the rank alone."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    plain = inner(model)
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        if hasattr(plain, "batch"):
            tokens = plain.batch(generator)
        else:
            tokens = torch.randint(29, (2, 5), generator=generator)
        random.seed(step)  # what an optimizer draws is the same on every rank
        torch.manual_seed(step)

        def closure(tokens: torch.Tensor = tokens) -> torch.Tensor:
            output = model(tokens)
            output = getattr(output, "logits", output)
            loss = output.float().pow(2).mean() + output.float().mean()
            optim.zero_grad()
            loss.backward()
            loss = loss.detach()
            if name == "torch LBFGS" and dist.is_initialized():  # it keeps the loss, and decides
                dist.all_reduce(loss)
            return loss

        # Prodigy adds up over FSDP's ranks in a tensor that it puts on CUDA, come what may.
        with (
            mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor)
            if name == "Prodigy"
            else contextlib.nullcontext()
        ):
            if name == "torch LBFGS":
                losses.append(float(optim.step(closure)))
            else:
                losses.append(float(closure()))
                optim.step()
    optim.zero_grad()
    return losses

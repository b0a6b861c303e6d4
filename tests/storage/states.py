"""State dicts to save, blank ones to load into, and bitwise comparison."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_fsdp_osd.storage.memory import DTYPES

State = dict[str, Any]


def every_dtype() -> State:
    """A tensor of each dtype that is stored by its bytes, every bit pattern allowed."""
    generator = torch.Generator().manual_seed(0)

    def random(name: str, dtype: torch.dtype) -> torch.Tensor:
        high = 2 if name == "bool" else 256
        shape = (3, 5, dtype.itemsize)
        raw = torch.randint(0, high, shape, dtype=torch.uint8, generator=generator)
        return raw.view(dtype)

    return {f"dtype.{name}": random(name, dtype) for name, dtype in DTYPES.items()}


def mixed() -> State:
    """Small and large, with strides, empty, scalar, opaque, and no tensors at all."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        **every_dtype(),
        "large": normal(700, 900),
        "odd": normal(1237, 211).to(torch.bfloat16),
        "vector": normal(70_001),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "transposed": normal(300, 200).t(),
        "channels_last": normal(2, 3, 40, 50).to(memory_format=torch.channels_last),
        "expanded": normal(1, 40).expand(30, 40),
        "view": normal(100, 100)[10:60, 5:],
        "conjugate": torch.randn(40, dtype=torch.complex64, generator=generator).conj(),
        "parameter": torch.nn.Parameter(normal(8, 8)),
        **{f"step.{i}": torch.tensor(float(i)) for i in range(20)},
        "group": {"lr": 0.25, "betas": (0.9, 0.95), "params": ["a.weight", "b.bias"]},
        "epoch": 7,
        "name": "flat",
        "nothing": None,
    }


def blank(state: Any) -> Any:
    """The same structure with other values, contiguous, to load into."""
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(blank(value) for value in state)
    return type(state)() if state is not None else "something"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, path
        assert torch.equal(bits(found), bits(expected)), path
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_same(found[key], value, f"{path}.{key}")
    else:
        assert found == expected, path


def load(reader: dcp.StorageReader, state: State) -> State:
    """A blank copy of `state`, loaded."""
    found: State = blank(state)
    dcp.load(found, storage_reader=reader)
    return found


class BoxPlanner(LoadPlanner):
    """Loads given boxes of one tensor, each into a tensor of its own.

    `boxes` are (offsets, lengths) within the entry that begins at the tensor's origin; `make` makes
    a destination of a shape.
    """

    def __init__(self, fqn: str, boxes: list[tuple[Any, Any]], make: Any = torch.zeros) -> None:
        self.fqn = fqn
        self.boxes = boxes
        self.found = [make(lengths) for _, lengths in boxes]
        self.committed: list[int] = []
        self.errors: list[BaseException] = []

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False):
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        index = next(i for i in self.metadata.storage_data if i.fqn == self.fqn)
        return LoadPlan(
            [
                ReadItem(
                    LoadItemType.TENSOR,
                    dest_index=dcp.metadata.MetadataIndex(str(number)),
                    dest_offsets=torch.Size(()),
                    storage_index=index,
                    storage_offsets=torch.Size(offsets),
                    lengths=torch.Size(lengths),
                )
                for number, (offsets, lengths) in enumerate(self.boxes)
            ]
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("no bytes are asked for")

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        raise AssertionError("no bytes are asked for")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.found[int(read_item.dest_index.fqn)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(int(read_item.dest_index.fqn))

    def on_read_error(self, error: BaseException) -> None:
        self.errors.append(error)

"""What a user sees of our objects in a log or debugger: one line, and no secret."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    FullStateReader,
    StreamingReader,
    StreamingWriter,
)
from dcp_fsdp_osd.layout.flat import simulate, units_of

SECRET = "wJalrXUtnFEMI"


def _objects() -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    options = {"key": "AKIA", "secret": SECRET, "client_kwargs": {"aws_session_token": SECRET}}
    url = f"s3://user:{SECRET}@bucket/run/step-100"
    layout = simulate(units_of({"a": (5, 3), "b": (7,)})[0], world_size=2, rank=0)
    return {
        "FlatOptimSavePlanner({'optim': <FlatLayout of 2 parameters: 2 whole>}": (
            FlatOptimSavePlanner(model, optim)
        ),
        "FlatOptimSavePlanner({'a.optim': <FlatLayout of 2 parameters: 2 flat; 12 of 22": (
            FlatOptimSavePlanner.from_layouts({"a.optim": layout})
        ),
        "form='full', strict=False, broadcast='auto')": (
            FlatOptimLoadPlanner(model, optim, form="full", strict=False)
        ),
        "StreamingWriter('s3://***@bucket/run/step-100', backend='fsspec', overwrite=True": (
            StreamingWriter(url, backend="fsspec", storage_options=options, overwrite=True)
        ),
        "StreamingReader('s3://***@bucket/run/step-100', backend='auto', verify=True": (
            StreamingReader(url, storage_options=options)
        ),
        "FullStateReader('optim.pt', key='optim')": FullStateReader("optim.pt"),
        "FullStateReader(dict, key='adam')": FullStateReader({"x": torch.ones(99)}, key="adam"),
        "FlatOptimState(Linear, AdamW)": FlatOptimState(model, optim),
        "FlatModelState(Linear)": FlatModelState(model),
        "<FlatLayout of 2 parameters: 2 flat; 12 of 22 flat elements here>": layout,
    }


def test_one_line_and_no_secret() -> None:
    for says, each in _objects().items():
        text = repr(each)
        assert says in text, text
        assert "\n" not in text and len(text) < 250 and SECRET not in text, text
        assert str(each) == text

"""``.metadata`` that lies: crafted pickles and names.  No code runs and nothing else changes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.storage.attacks.case import Attack, Refused
from tests.storage.conftest import Place
from tests.storage.states import load

STATE = {"weight": torch.arange(3000.0).view(10, 300), "lr": 0.5}


def crafted(pickled: bytes) -> Any:
    """An attack that loads a checkpoint whose metadata are these bytes."""

    def attack(place: Place) -> None:
        dcp.save(dict(STATE), storage_writer=place.writer())
        place.store().put(".metadata", pickled, exclusive=False)
        load(place.reader(), STATE)

    return attack


CASES = [
    Attack(
        "a call of os.system",
        attack=crafted(b"cos\nsystem\n(Vtrue\ntR."),
        must=Refused("os.system"),
    ),
]

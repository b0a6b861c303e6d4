"""Servers that answer wrongly, or slowly, to what a save asks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_fsdp_osd.storage import StreamingWriter, latest
from dcp_fsdp_osd.storage.transfer import RetryPolicy
from tests.servers import Fault, FaultProxy, fault_proxy
from tests.storage.attacks.case import Attack, Gives, Refused
from tests.storage.conftest import Place
from tests.storage.states import load

STATE = {"weight": torch.arange(3000.0).view(10, 300), "lr": 0.5}
METADATA = r"\.metadata(\?|$)"
REMOTE = ("s3fs", "obstore")
RETRY = RetryPolicy(tries=3, first=0.01, longest=0.1)


def through(place: Place, proxy: FaultProxy) -> dict[str, Any]:
    """The arguments of a reader or writer that reaches the place through a proxy."""
    s3 = proxy.s3
    options = s3.storage_options if place.kind == "s3fs" else s3.obstore_options
    return {"backend": place.backend, "storage_options": options}


def saved_with(**fault: Any) -> Callable[[Place], Any]:
    """An attack that saves through a proxy which injects this, and loads without."""

    def attack(place: Place) -> Any:
        assert place.endpoint is not None
        with fault_proxy(place.endpoint) as proxy:
            proxy.inject(method="PUT", path=METADATA, header="if-none-match", **fault)
            arguments = through(place, proxy)
            dcp.save(
                dict(STATE), storage_writer=StreamingWriter(place.url, retry=RETRY, **arguments)
            )
        return load(place.reader(), STATE)

    return attack


def no_bucket(place: Place) -> None:
    url = re.sub(r"://[^/]+", "://no-such-bucket", place.url)
    dcp.save(dict(STATE), storage_writer=dataclasses.replace(place, url=url).writer(retry=RETRY))


def one_error_in_a_scan(place: Place) -> Any:
    """``latest`` among five, with one 503 at the fourth: which, and how many listings it took."""
    for step in range(5):
        dcp.save({"n": torch.zeros(1)}, storage_writer=place.below(f"step-{step}").writer())
    assert place.endpoint is not None
    with fault_proxy(place.endpoint) as proxy:
        proxy.inject(Fault.status(503), method="HEAD", path=METADATA, skip=3)
        found = latest(place.url, **through(place, proxy))
        lists = len(proxy.seen("GET", "list-type=2"))
    return found == f"{place.url}/step-4", lists


CASES = [
    Attack("one 409", attack=saved_with(fault=Fault.status(409)), must=Gives(STATE), on=REMOTE),
    Attack("one 412", attack=saved_with(fault=Fault.status(412)), must=Gives(STATE), on=REMOTE),
    Attack(
        "412 where nothing exists",
        attack=saved_with(fault=Fault.status(412), times=-1),
        must=Refused("exists, and that it does not"),
        on=REMOTE,
    ),
    Attack(
        "501 to conditions",
        attack=saved_with(fault=Fault.status(501), times=-1),
        must=Gives(STATE),
        on=REMOTE,
    ),
    Attack("no bucket", attack=no_bucket, must=Refused("bucket"), on=REMOTE),
    Attack("one 503 in a scan", attack=one_error_in_a_scan, must=Gives((True, 1)), on=REMOTE),
]

"""``python -m tests.soak``: rounds until the time is up, then all that was committed once more."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.rounds import KINDS


def main() -> None:
    # Each rank imports this module; it has no use for the servers.
    from tests.soak.driver import soak
    from tests.torch_gaps import complete_torch

    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--world", type=int, default=8, help="ranks at most")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; others follow")
    parser.add_argument("--rounds", type=int, default=1 << 40, help="at most")
    parser.add_argument("--replay", type=int, metavar="SEED", help="make this round alone")
    parser.add_argument("--kind", choices=sorted(KINDS), help="rounds of this kind alone")
    parser.add_argument("--log", type=Path, help="a line of JSON for each round")
    options = parser.parse_args()
    complete_torch()
    if options.log is not None:
        options.log.parent.mkdir(parents=True, exist_ok=True)
    seed = options.seed if options.replay is None else options.replay
    rounds = options.rounds if options.replay is None else 1
    end = time.monotonic() + 60 * options.minutes
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        (options.log or Path("/dev/null")).open("a") as log,
        soak(Path(folder), world=options.world, log=log) as running,
    ):
        if options.replay is None:
            running.warm_up()
        running.sample()
        told = time.monotonic()
        for number in range(rounds):
            if time.monotonic() > end:
                break
            running.run(seed + number, options.kind)
            for text in running.account.problems()[:1]:
                if number < 3 or time.monotonic() > told + 60:
                    print(f"PROBLEM: {text}", flush=True)
            if time.monotonic() > told + 60:
                told = time.monotonic()
                print(next(running.account.lines()), flush=True)
        running.check_all()
        running.sample()
        account = running.account
    print(*account.lines(), sep="\n")
    sys.exit(1 if account.problems() else 0)


if __name__ == "__main__":
    main()

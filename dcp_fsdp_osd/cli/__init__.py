"""``dcp-osd``: the tools of ``dcp_fsdp_osd.tools`` as commands."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]


def main() -> None:
    """The console script."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"dcp-osd needs {' and '.join(missing)}, which is not installed: run "
            "`pip install 'dcp-fsdp-osd[cli]'`",
            file=sys.stderr,
        )
        raise SystemExit(2)
    from dcp_fsdp_osd.cli.app import app

    app(prog_name="dcp-osd")

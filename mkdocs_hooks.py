"""For `make docs`: what docstrings say in reStructuredText, as the pages show it."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(?:~[\w.]*\.)?")


def on_page_content(html: str, **_: Any) -> str:
    """``:class:`~a.b.C``` becomes ``C``; the ``::`` before a code block goes."""
    return _ROLE.sub("<code>", html).replace("<p>::</p>", "")

"""A real browser for pages: Debian's chromium, driven over its own chromedriver."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",  # as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--window-size=1280,1000",
)


@dataclass
class Browser:
    """An open one."""

    driver: Any

    def open(self, page: Path) -> None:
        """A page, as from the disk of whoever was sent it."""
        self.driver.get("about:blank")  # the browser's own first page has requests of its own
        self.complaints()
        self.requests()
        self.driver.get(page.as_uri())

    def hover(self, selector: str) -> str:
        """Point at the middle of an element; what the page's tip says then."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.by import By

        element = self.driver.find_element(By.CSS_SELECTOR, selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        ActionChains(self.driver, duration=0).move_to_element(element).perform()
        tip = self.driver.find_element(By.ID, "tip")
        return str(tip.text) if tip.is_displayed() else ""

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the last call."""
        return [each["message"] for each in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What was asked of anybody since the last call: all but files and the page's own data."""
        events = [json.loads(each["message"]) for each in self.driver.get_log("performance")]
        urls = [
            each["message"]["params"]["request"]["url"]
            for each in events
            if each["message"]["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if urlsplit(url).scheme not in ("file", "data")]


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a new profile; the test is skipped where there is none."""
    selenium = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    binary = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with a chromedriver here (Debian: chromium chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        opened = selenium.Chrome(options=options, service=Service(driver))
        try:
            yield Browser(opened)
        finally:
            opened.quit()

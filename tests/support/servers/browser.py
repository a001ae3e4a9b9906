"""A real headless browser through the WebDriver protocol, to test what a page looks like."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from support.waiting import wait_until

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

# Texts that are hard to read: less contrast with the background than WCAG 2 requires (AA), which excepts
# disabled controls.
FAINT = """
const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const numbers = (colour) => colour.match(/[0-9.]+/g).map(Number);
const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, k, at) => sum + k * channel(colour[at]), 0);
const out = [];
for (const node of document.querySelectorAll('body *')) {
  const words = [...node.childNodes].filter((each) => each.nodeType === 3 && each.data.trim());
  if (!words.length || !node.getClientRects().length || node.matches(':disabled, option, script')) continue;
  let under = node;
  while (under && numbers(getComputedStyle(under).backgroundColor)[3] === 0) under = under.parentElement;
  const behind = under ? getComputedStyle(under).backgroundColor : 'rgb(255, 255, 255)';
  const pair = [getComputedStyle(node).color, behind];
  const [dark, bright] = pair.map((each) => light(numbers(each))).sort((a, b) => a - b);
  if ((bright + 0.05) / (dark + 0.05) < 4.5) out.push(words[0].data.trim());
}
return out
"""


class Browser:
    """A real browser through the WebDriver protocol."""

    def __init__(self, port: int) -> None:
        self._at = f"http://127.0.0.1:{port}/session"
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
        arguments = [*flags.split(), "--disable-background-networking", "--hide-scrollbars"]
        options = {"binary": CHROMIUM, "args": arguments}
        made = self._call("POST", "", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
        self._at += f"/{made['sessionId']}"

    def open(self, page: Path | str, width: int) -> None:
        """Open a file or URL."""
        self._call("POST", "/window/rect", {"width": width, "height": 900})
        self._call("POST", "/url", {"url": page if isinstance(page, str) else page.as_uri()})

    def look_like(self, width: int, height: int, scheme: Literal["light", "dark"]) -> None:
        """Emulate a screen of this size from now on: no window is as narrow as a phone's."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        colours = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        for command, arguments in (("setDeviceMetricsOverride", screen), ("setEmulatedMedia", colours)):
            body = {"cmd": f"Emulation.{command}", "params": arguments}
            self._call("POST", "/goog/cdp/execute", body)

    def picture(self, path: Path) -> None:
        """The visible page, as a PNG."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def run(self, script: str) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def close(self) -> None:
        self._call("DELETE", "")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._at + path, data, method=method)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["value"]


@contextmanager
def real_browser() -> Iterator[Browser]:
    """A browser for a test, which is skipped if none is installed."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no chromium with a chromedriver here")
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ports = (re.search(r"started successfully on port (\d+)", line) for line in process.stdout)
        found = Browser(int(next(match[1] for match in ports if match)))
        yield found
        found.close()
    finally:
        process.terminate()
        process.wait(600)


def wait_for(browser: Browser, what: str) -> Any:
    """Return the value of a script once it is true on the page."""
    found: list[Any] = []
    wait_until(lambda: found.append(browser.run(f"return {what}")) or found[-1], what=what)
    return found[-1]

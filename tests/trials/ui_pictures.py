"""Pictures of the live page: SmolLM2 and its drafter behind a real server, in a real browser.

python tests/trials ui_pictures docs      writes ui.png, ui-dark.png and ui-phone.png (`make ui-pictures`)
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import httpx
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.ui import USUAL_PROMPT
from manta.cluster.config import EngineConfig
from PIL import Image
from support.checkpoints.text_pair import LiveServer
from support.servers.browser import Browser, real_browser, wait_for

# Name, width, height, colors, and the element at the top.
PICTURES: tuple[tuple[str, int, int, Literal["light", "dark"], str], ...] = (
    ("ui", 1180, 912, "light", "header"),
    ("ui-dark", 1180, 912, "dark", "header"),
    ("ui-phone", 390, 760, "light", "#turns"),
)
WAIT_S = 60.0


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as batches:
        settings = ServerSettings(batch_storage=batches)
        drafting = {"model": "smollm2-drafter", "adaptive": False}
        config = EngineConfig.from_dict({"model": "smollm2", "speculative_config": drafting})
        with LiveServer(config, settings) as server, real_browser() as browser:
            ask_a_batch(server.url)
            browser.open(f"{server.url}/ui", 1280)
            wait_for(browser, "before !== null && document.getElementById('state').textContent === 'ready'")
            run(browser)  # the first request includes compilation
            for name, width, height, scheme, top in PICTURES:
                browser.look_like(width, height, scheme)
                take(browser, folder / f"{name}.png", top)


def ask_a_batch(url: str) -> None:
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "The sun", "max_tokens": 32}}
    lines = "\n".join(json.dumps({"custom_id": str(i), **line}) for i in range(24))
    with httpx.Client(base_url=url, timeout=WAIT_S) as http:
        sent = http.post("/v1/files", files={"file": ("lines.jsonl", lines)}, data={"purpose": "batch"})
        http.post("/v1/batches", json={"input_file_id": sent.json()["id"], "endpoint": "/v1/completions"})


def take(browser: Browser, path: Path, top: str) -> None:
    """The page's content when an answer has arrived, and the metrics at that second."""
    run(browser)
    browser.run(f"document.querySelector('{top}').scrollIntoView()")
    time.sleep(2)  # the page looks at the metrics every second
    browser.picture(path)
    with Image.open(path) as picture:
        small = picture.quantize(256)
    small.save(path, optimize=True)


def run(browser: Browser) -> None:
    browser.run(
        f"document.getElementById('prompt').value = {json.dumps(USUAL_PROMPT)};"
        "document.getElementById('chat').checked = true; document.getElementById('temperature').value = 0;"
        "document.getElementById('anew').click(); document.getElementById('go').click()"
    )
    wait_for(browser, "document.querySelector('.verdict') !== null")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

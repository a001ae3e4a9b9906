"""A tiny random pair with a tokenizer, and a live HTTP server over an engine."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import uvicorn
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.http.app import create_app
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from manta.cluster.engine.step_watchdog import StepWatchdog
from manta.cluster.step.executor import Executor
from safetensors.torch import load_file, save_file

from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.paths import DATA
from support.waiting import WAIT_S

VOCAB = 384
CORPUS = DATA / "corpus.txt"  # the tokenizer is made of it: it stays as it is
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if style %}{{ style }}{% endif %}{% endif %}"
)


def make_text_pair(
    folder: Path,
    *,
    family: str = "qwen3",
    special_tokens: Sequence[str] = (),
    template: str = TEMPLATE,
    context: int = 512,
) -> tuple[Path, Path]:
    """A target with a byte-level tokenizer and a chat template, and a drafter for it."""
    target = make_tiny_target(folder / "target", family, vocab_size=VOCAB)
    drafter = make_tiny_drafter(folder / "drafter", vocab_size=VOCAB)
    for config in (target / "config.json", drafter / "config.json"):
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": context}))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special_tokens],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS.read_text(encoding="utf-8")], trainer)
    backend.save(str(target / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>", "chat_template": template}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target, drafter


def tiny_settings(pair: tuple[Path, Path], **more: Any) -> dict[str, Any]:  # Any: settings
    """Settings of a tiny pair's engine on the CPU, as under `args:` in ray_config.yaml."""
    return {
        "model": str(pair[0]),
        "speculative_config": {"model": str(pair[1])},
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        **more,
    }


NOT_A_NUMBER = "\x01"  # one token, which a broken pair cannot read


def make_pair_with_nan(folder: Path) -> tuple[Path, Path]:
    """A pair whose target computes NaN after NOT_A_NUMBER, which it never generates itself."""
    target, drafter = make_text_pair(folder, family="llama")  # its head is a separate matrix
    (token_id,) = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json")).encode(NOT_A_NUMBER).ids
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][token_id] = math.nan
    weights["lm_head.weight"][token_id] = 0.0
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target, drafter


class LiveServer:
    """The application on a free loopback port; its event loop (`loop`) and uvicorn run in a thread."""

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerSettings | None = None,
        make: Callable[[EngineConfig], Executor] | None = None,
        max_requests: int | None = None,
        watch: StepWatchdog | None = None,
    ) -> None:
        self._max_requests = max_requests
        self.engine = AsyncEngine(config, make or make_executor, watch)
        self._settings = settings or ServerSettings()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(timeout=600)  # a fresh copy compiles loops first
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=WAIT_S)
        assert not self._thread.is_alive(), "the server did not stop"

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.engine.start()
        try:
            app = create_app(self.engine, self._settings, max_requests=self._max_requests)
            self._server = uvicorn.Server(
                uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5, timeout_keep_alive=300)
            )
            self._ready.set()
            await self._server.serve(sockets=[self._socket])
        finally:
            self.engine.close()

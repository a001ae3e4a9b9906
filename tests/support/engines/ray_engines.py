"""Settings of engines whose workers are Ray actors, and waiting for processes."""

from __future__ import annotations

from pathlib import Path

from manta.cluster.config import EngineConfig

from support.waiting import wait_until as wait_until

BASE = EngineConfig(
    model="",
    skip_tokenizer_init=True,
    dtype="float32",
    device="cpu",
    max_model_len=192,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_pages=48,
    num_threads=1,
)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False

"""What to use here for llama.cpp's flags; `docs/how-to/from-llama-cpp.md` lists them all and what differs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

FIELD = "a field of each request"
FLAGS = {
    **dict.fromkeys(("-c", "--ctx-size"), "--max-model-len"),
    **dict.fromkeys(("-np", "--parallel"), "--max-num-seqs"),
    **dict.fromkeys(("-t", "--threads"), "--num-threads"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), "--device"),
    **dict.fromkeys(("-md", "--model-draft"), "--spec-model"),
    **dict.fromkeys(("-hf", "--hf-repo"), "the same names, without the flag"),
    **dict.fromkeys(("-a", "--alias"), "--served-model-name"),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), "--max-num-batched-tokens"),
    **dict.fromkeys(("-fa", "--flash-attn"), "nothing"),
    "-n": FIELD,
    **dict.fromkeys(("--temp", "--top-k", "--top-p", "--min-p"), FIELD),
    "--chat-template-file": "--chat-template",
    "--spec-type": "--spec-method",
    "--spec-draft-n-max": "--spec-tokens",
    "--jinja": "templates are always rendered",
    "-sm": "-tp",
    **dict.fromkeys(("--metrics", "--slots", "-cb", "--cont-batching", "--cache-reuse"), "always"),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), "--kv-cache-dtype"),
    **dict.fromkeys(("--mlock", "--no-mmap", "--numa"), "no counterpart"),
    **dict.fromkeys(("--lora", "--mmproj", "--embedding", "--rerank"), "not served"),
    **dict.fromkeys(("--reasoning-format", "--reasoning-budget"), "--reasoning-parser"),
    **dict.fromkeys(("--rope-scaling", "--override-kv"), "--hf-overrides"),
}


def hint_for(arguments: Sequence[str], known: Collection[str]) -> str | None:
    """Return what to write for the first of llama.cpp's flags that is not one of the command's; else None."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in FLAGS and flag not in known:
            return f"{flag} is llama.cpp's. Here: {FLAGS[flag]} (docs/how-to/from-llama-cpp.md)."
    return None

"""aiperf profile, against chat and text completions; it reads acceptance out of the answers.

It also scrapes `/metrics` of a server that has no key: it sends its key to the API alone.
"""

from __future__ import annotations

import json

from trial import FOLDER, KEY, MODEL, TARGET, URL, check, command, main

COUNT, TOKENS = 8, 24


def profile(kind: str) -> None:
    folder = FOLDER / f"aiperf-{kind}"
    command(
        "aiperf",
        "profile",
        *("--model", MODEL, "--url", URL, "--api-key", KEY, "--tokenizer", TARGET),
        *("--endpoint-type", kind, "--streaming", "--use-server-token-count"),
        *("--concurrency", "2", "--request-count", str(COUNT)),
        *("--isl", "64", "--osl", str(TOKENS), "--extra-inputs", "ignore_eos:true"),
        *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", str(folder)),
    )
    figures = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert figures["request_count"]["avg"] == COUNT and not figures["error_summary"], figures["error_summary"]
    assert figures["output_sequence_length"]["avg"] == TOKENS
    assert 1 <= figures["spec_decode_acceptance_length"]["avg"] <= TOKENS


@check("profile --endpoint-type chat: all answered, tokens and acceptance read")
def chat() -> None:
    profile("chat")


@check("profile --endpoint-type completions: the same")
def completions() -> None:
    profile("completions")


main()

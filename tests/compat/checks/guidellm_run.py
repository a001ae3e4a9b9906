"""guidellm run, against chat and text completions, with synthetic prompts and the pair's own tokenizer."""

from __future__ import annotations

import json

from trial import FOLDER, KEY, MODEL, TARGET, URL, check, command, main

COUNT, TOKENS = 8, 24


def run(path: str) -> None:
    report = FOLDER / f"guidellm{path.replace('/', '-')}.json"
    backend = f"kind=openai_http,target={URL},model={MODEL},api_key={KEY},request_format={path}"
    command(
        "guidellm",
        "run",
        *("--backend", backend),
        *("--tokenizer", f"kind=huggingface_auto,model={TARGET}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={COUNT}"),
        *("--output", f"kind=json,path={report}"),
        "--disable-console",
    )
    (done,) = json.loads(report.read_text())["benchmarks"]
    totals = done["metrics"]["request_totals"]
    assert totals["successful"] == COUNT and totals["errored"] == 0, totals
    for request in done["requests"]["successful"]:
        assert request["output_tokens"] == TOKENS and request["time_to_first_token_ms"] > 0
        assert request["response_metrics"]["speculative_decoding"]["num_spec_tokens"] > 0


@check("run over /v1/chat/completions: all answered, tokens, times and acceptance read")
def chat() -> None:
    run("/v1/chat/completions")


@check("run over /v1/completions: the same")
def completions() -> None:
    run("/v1/completions")


main()

"""Compares two passes over the same prompts in one engine, with and without speculation.

Every step drafts whole blocks, whether or not this is faster, to cover more cases. The second pass runs in
reverse order, so that answers have other neighbors in their batches; the prefix cache is as configured. The
certificate names model, drafter, settings, machine, number of tokens, and all differences. In bf16, and on a
GPU without `batch_invariant`, another batch can decide a near-tie differently, which is reported as a
mismatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...actors.batch.ledger.job_spec import checkpoint_identity
from ...actors.checkpoints.checkpoint_paths import drafter_folder, target_folder
from ...actors.engine.outputs import RequestOutput
from ...actors.llm import LLM
from ...actors.system.atomic_files import rounded, write_json
from ...actors.system.wait_messages import say
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError
from ...cluster.request.request import SamplingParams
from ...cluster.speculation.acceptance_length import mean_acceptance_length
from ..bench.common.engine_passes import encode_prompts, read_rows
from ..bench.common.provenance import provenance
from ..common.generate import open_llm
from ..common.options import AuditOptions
from ..common.progress import TimeLeft

Certificate = dict[str, Any]  # Any: JSON
SHOWN = 20  # mismatches in the certificate


def run_audit(config: EngineConfig, options: AuditOptions) -> Certificate:
    """Answer all prompts with speculation and without, and return where tokens differ, as a certificate.

    Drafts are made in every step. The second half runs in reverse order, so in other batches.
    """
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config is missing: there is no speculation to audit. Give --spec-model.",
            param="speculative_config",
        )
    spec = replace(config.speculative_config, adaptive=False)
    config = replace(config, speculative_config=spec)
    rows = read_rows(options.prompts, options.num_prompts)
    say("loading the models")
    with open_llm(config) as llm:
        prompts = encode_prompts([(row.name, row.prompt) for row in rows], llm.tokenizer)
        requests = [
            (name, token_ids, _params(options, temperature, seed))
            for temperature in options.temperatures
            for seed, (name, token_ids) in enumerate(prompts)
        ]
        speculated = _answers(llm, requests, None, "1/2, with speculation")
        stats = llm.stats()
        plain = _answers(llm, requests[::-1], 0, "2/2, without")[::-1]
        info = llm.info
    found = [
        {"id": name, "temperature": params.temperature, "seed": params.seed, "position": position}
        for (name, _, params), mine, theirs in zip(requests, speculated, plain, strict=True)
        if (position := _differs_at(_tokens(mine), _tokens(theirs))) is not None
    ]
    certificate: Certificate = {
        "lossless": not found,
        "requests": len(requests),
        "tokens": sum(len(_tokens(each)) for each in plain),
        "mismatches": len(found),
        "first_mismatches": found[:SHOWN],
        "mean_acceptance_length": rounded(
            mean_acceptance_length(stats.num_drafts, stats.num_accepted_tokens)
        ),
        "drafted_tokens": stats.num_draft_tokens,
        "target": _checkpoint(config.model, target_folder(config)),
        "method": spec.method,
        "drafter": None
        if spec.model is None
        else _checkpoint(spec.model, drafter_folder(config, spec.model)),
        "device": info.device,
        "dtype": info.dtype,
        "batch_invariant_asked": config.batch_invariant,
        "temperatures": list(options.temperatures),
        "max_tokens": options.max_tokens,
        "prompts": str(options.prompts),
        "engine": asdict(config),
        "provenance": provenance(),
    }
    if options.output is not None:
        write_json(options.output, certificate)
    return certificate


def print_certificate(certificate: Certificate) -> None:
    count, length = certificate["mismatches"], certificate["mean_acceptance_length"]
    print(
        f"{certificate['requests']} requests, {certificate['tokens']} tokens, {certificate['dtype']} on "
        f"{certificate['device']}; mean acceptance length {length if length is not None else '-'}"
    )
    for each in certificate["first_mismatches"]:
        print(f"differs: {each['id']} at temperature {each['temperature']:g}, token {each['position']}")
    print("every token is the same without speculation" if not count else f"{count} answers differ")


def _params(options: AuditOptions, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=options.max_tokens, detokenize=False)


def _answers(
    llm: LLM,
    requests: Sequence[tuple[str, Sequence[int], SamplingParams]],
    max_draft_tokens: int | None,
    what: str,
) -> list[RequestOutput]:
    def progress(total: int, **_: object) -> TimeLeft:
        return TimeLeft(what, total, "requests")

    prompts = [list(token_ids) for _, token_ids, _ in requests]
    params = [params for _, _, params in requests]
    return llm.generate(prompts, params, use_tqdm=progress, max_draft_tokens=max_draft_tokens)


def _tokens(answer: RequestOutput) -> Sequence[int]:
    return answer.outputs[0].token_ids


def _differs_at(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    for at, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            return at
    return None if len(mine) == len(theirs) else min(len(mine), len(theirs))


def _checkpoint(model: str, folder: Path) -> dict[str, str]:
    return {"model": model, "digest": checkpoint_identity(folder)}

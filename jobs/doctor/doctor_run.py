"""`manta doctor`: runs all checks, in this process without Ray or HTTP, and prints a summary or a table.

machine       hardware and software                                  machine.py
Manta uses    backend for the pair, and why not the others           machine.py
a backend     its operators and passes against fp64                  cases/operators.py
own products  our kernels alone, with fused operations               cases/products.py
own experts   our kernels for routed experts, plain and packed       cases/experts.py
own latents   attention over latents, absorbed and expanded          cases/latents.py
own delta rule                                                       cases/delta_rule.py
steps         a step's kernels; captured steps                       cases/steps.py, cuda_graph_check.py
drafts        margins, trimming, DFlash2's kernels, odd head sizes   cases/drafts.py
pair          answers, token by token                                pair_check.py
rates         bandwidth and FLOP rate                                rate_checks.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...actors.system.atomic_files import write_json
from ...actors.system.host_resources import owned_cores
from ...actors.system.wait_messages import Wait, counting, say
from ...actors.targets.loading.backend_selection import why_not
from ...actors.targets.loading.resolved_config import ResolvedConfig, resolve_config
from ...cluster.config import EngineConfig, SpeculativeConfig
from ...drafter.compute.backend import DeviceCapabilities
from ..bench.common.provenance import options_json, provenance
from ..common.options import SHIPPED_PAIR, DoctorOptions
from ..common.tables import print_table
from .cases.checks import Check, CheckOutcome, Finding, NotHereError, examine, raising
from .cases.operators import operator_checks
from .cases.subject import MachineKind
from .machine import choice_checks, machine_checks
from .pair_check import NO_GPU, pair_checks
from .rate_checks import rate_checks

_ROOT = Path(__file__).resolve().parents[2]  # root of a checkout
Report = dict[str, Any]  # Any: JSON
# Lines of the summary: title, group of the findings, and their names with the label before each.
_SUMMARY = (
    ("machine", "machine", (("CPU", ""), ("cores", "cores"), ("free RAM", "free RAM"), ("GPU", "GPU"))),
    ("software", "machine", (("PyTorch", "PyTorch"), ("Triton", "Triton"), ("Ray", "Ray"))),
    ("Manta uses", "Manta uses", (("device", ""), ("dtype", ""), ("attention backend", "backend"))),
)


def run_doctor(options: DoctorOptions) -> Report:
    """Run all checks, with progress on standard error, and return the report.

    If it is written, then after each check, so that a limit of time loses no result.
    """
    torch.set_num_threads(owned_cores())
    report: Report = {
        "provenance": provenance(),
        "options": options_json(options),
        "findings": [],
        "failed": 0,
    }
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
    with counting("inspecting the machine", say) as wait:
        for check in _checks(options):
            finding = _examine(check, wait)
            report["findings"].append(asdict(finding))
            report["failed"] += finding.status == "failed"
            if options.output is not None:
                write_json(options.output, report)
    return report


def print_report(report: Report, *, verbose: bool) -> None:
    """Print a summary, or with `verbose` each finding, then what to do about failures and the verdict."""
    findings = report["findings"]
    if verbose:
        _print_findings(findings)
    else:
        print("\n".join(_summary(findings)))
    for finding in findings:
        if finding["status"] == "failed":
            name = f"{finding['group']}: {finding['name']}"
            print(f"{name} failed ({finding['measured']}). What to do: {finding['remedy']}.")
    seconds = sum(finding["seconds"] for finding in findings)
    more = "" if verbose else "; --verbose shows each"
    print(f"{report['failed'] or 'Nothing'} failed of {len(findings)} lines, in {seconds:.0f} s{more}.")


def _summary(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:  # Any: JSON
    """Yield a line for each part of the report that has findings."""
    facts = {(each["group"], each["name"]): each["measured"] for each in findings}
    for title, group, names in _SUMMARY:
        found = [f"{label} {facts[group, name]}".strip() for name, label in names if (group, name) in facts]
        if found:
            yield f"{title}: {', '.join(found)}"
    checks = [each for each in findings if each["status"] != "fact" and each["group"] != "rates"]
    counts = Counter(each["status"] for each in checks)
    if checks:
        skipped = f", {counts['skipped']} are not for this machine" if counts["skipped"] else ""
        yield f"checks: {counts['ok']} passed{skipped}"
    rates = [f"{each['name']} {each['measured']}" for each in findings if each["group"] == "rates"]
    if rates:
        yield f"measured: {', '.join(rates)}"


def _print_findings(findings: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON
    rows = [
        [
            f"{f['group']}: {f['name']}",
            "" if f["status"] == "fact" else f["status"],
            f["measured"],
            f["bound"],
        ]
        for f in findings
    ]
    print_table("manta doctor", ["", "status", "measured", "bound"], rows, num_left=4)


def _examine(check: Check, wait: Wait) -> Finding:
    wait.what = f"{check.group}: {check.name}"
    return examine(check)


def _checks(options: DoctorOptions) -> Iterator[Check]:
    """Yield the checks in the order of the table; a part that cannot list its checks is itself a failure."""
    place, quick = MachineKind.detect(), options.quick
    found: list[ResolvedConfig] = []
    parts: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("machine", machine_checks),
        ("pair", lambda: _plan_check(options, found)),
        ("Manta uses", lambda: _of_settings(found, choice_checks)),
        ("backends", lambda: operator_checks(place, quick=quick)),
        ("kernels", lambda: kernel_checks(place, quick=quick)),
        ("captured steps", lambda: _captured_checks(found)),
        ("pair", lambda: _of_settings(found, partial(pair_checks, quick=quick))),
        ("rates", lambda: rate_checks(place)),
    ]
    for name, checks in parts:
        try:
            yield from checks()
        except Exception as error:
            yield raising(name, "listing the checks", error)


def _of_settings(
    found: list[ResolvedConfig], checks: Callable[[ResolvedConfig], Iterator[Check]]
) -> Iterator[Check]:
    for resolved in found:
        yield from checks(resolved)


def _plan_check(options: DoctorOptions, found: list[ResolvedConfig]) -> Iterator[Check]:
    look = partial(_plan, options, found)
    yield Check("pair", "checkpoints", look, "give --model and --spec-model that fit each other")


def _plan(options: DoctorOptions, found: list[ResolvedConfig]) -> CheckOutcome:
    pair = (options.model, options.spec_model)
    if pair == SHIPPED_PAIR and not any(all((at / name).is_dir() for name in pair) for at in (Path(), _ROOT)):
        raise NotHereError("the shipped pair is not here; give --model and --spec-model")
    spec = SpeculativeConfig(model=options.spec_model)
    config = EngineConfig(model=options.model, speculative_config=spec, skip_tokenizer_init=True)
    found.append(resolve_config(config))
    return CheckOutcome(", ".join(pair))


def kernel_checks(machine: MachineKind, *, quick: bool) -> Iterator[Check]:
    """Yield checks of kernels that the backends' operators do not cover, where Triton runs."""
    capabilities = DeviceCapabilities(machine.device, torch.float32, 16, num_ranks=1)
    reason = why_not("triton", [machine.shape.target.stack_spec()], capabilities)
    if reason is not None:
        for group in ("own products", "own experts", "own latents", "own delta rule", "steps", "drafts"):
            yield raising(group, "kernels", NotHereError(f"triton {reason}"))
        return
    from .cases.delta_rule import delta_checks
    from .cases.drafts import draft_checks
    from .cases.experts import expert_checks
    from .cases.latents import latent_checks
    from .cases.products import product_checks
    from .cases.steps import step_checks

    yield from product_checks(machine, quick=quick)
    yield from expert_checks(machine, quick=quick)
    yield from latent_checks(machine, quick=quick)
    yield from delta_checks(machine, quick=quick)
    yield from step_checks(machine, quick=quick)
    yield from draft_checks(machine)


def _captured_checks(found: list[ResolvedConfig]) -> Iterator[Check]:
    if not torch.cuda.is_available():
        yield raising("steps", "captured = launched", NotHereError(NO_GPU))
    elif found and found[0].attention_backend == "triton":
        from .cuda_graph_check import capture_checks

        yield from capture_checks(found[0])
    else:
        reason = "no pair, or its backend is not Triton"
        yield raising("steps", "captured = launched", NotHereError(reason))

"""`manta doctor`: look at everything, print one table, and say whether anything failed.

    machine       what there is                                          machine.py
    Manta uses    what the pair will run on, and why not on the rest     choice.py
    a backend     its operators and passes against fp64                  cases/operators.py, passes.py
    own products  ours alone, with what is fused to them                 cases/products.py
    own experts   routed ones, ours alone; weights plain and packed      cases/experts.py
    own latents   attention over them, absorbed and expanded             cases/latents.py
    own delta rule                                                       cases/delta_rule.py
    steps         a step's kernels; captured steps                       cases/steps.py, capture.py
    drafts        margins, cuts, DFlash2's kernels, odd heads            cases/drafts.py
    pair          answers, token by token                                pair.py
    rates         bandwidth and FLOP rate                                rates.py

In this process, without Ray or HTTP. Called by `cli.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...actors.files import write_json
from ...actors.machine import owned_cores
from ...actors.targets.loading.backends import why_not
from ...actors.targets.loading.plan import LoadPlan, plan_load
from ...cluster.config import EngineConfig, SpeculativeConfig
from ...drafter.compute.backend import Machine
from ..bench.provenance import provenance
from ..progress import Wait, counting, say
from ..tables import print_table
from .cases.operators import operator_checks
from .cases.subject import Place
from .choice import choice_checks
from .findings import Check, Finding, NotHereError, Outcome, examine, raising
from .machine import machine_checks
from .pair import NO_GPU, pair_checks
from .rates import rate_checks

SHIPPED_PAIR = ("models/target", "models/drafter")
_ROOT = Path(__file__).resolve().parents[2]  # of a checkout
Report = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What is looked at.

    Attributes:
        model, spec_model: the pair: folders or hub ids.
        quick: fewer dtypes, prompts and tokens.
        output: JSON file for the report.
    """

    model: str = SHIPPED_PAIR[0]
    spec_model: str = SHIPPED_PAIR[1]
    quick: bool = False
    output: Path | None = None


def run_doctor(options: DoctorOptions) -> Report:
    """Look, telling on standard error what is being looked at, and write what the options ask for."""
    torch.set_num_threads(owned_cores())
    with counting("looking at the machine", say) as wait:
        findings = [_examine(check, wait) for check in _checks(options)]
    report: Report = {
        "provenance": provenance(),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()},
        "findings": [asdict(finding) for finding in findings],
        "failed": sum(finding.status == "failed" for finding in findings),
    }
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.output, report)
    return report


def print_report(report: Report) -> None:
    """The table; below it what to do."""
    findings = report["findings"]
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
    for finding in findings:
        if finding["status"] == "failed":
            print(f"{finding['group']}: {finding['name']} failed. What to do: {finding['remedy']}.")
    seconds = sum(finding["seconds"] for finding in findings)
    print(f"{report['failed'] or 'Nothing'} failed of {len(findings)} lines, in {seconds:.0f} s.")


def _examine(check: Check, wait: Wait) -> Finding:
    wait.turn_to(f"{check.group}: {check.name}")
    return examine(check)


def _checks(options: DoctorOptions) -> Iterator[Check]:
    """In the order of the table; where a part cannot even say what it looks at, that is its failure."""
    place, quick = Place.here(), options.quick
    found: list[LoadPlan] = []
    parts: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("machine", machine_checks),
        ("pair", lambda: _plan_check(options, found)),
        ("Manta uses", lambda: _of_plan(found, choice_checks)),
        ("backends", lambda: operator_checks(place, quick=quick)),
        ("kernels", lambda: kernel_checks(place, quick=quick)),
        ("captured steps", lambda: _captured_checks(found)),
        ("pair", lambda: _of_plan(found, partial(pair_checks, quick=quick))),
        ("rates", lambda: rate_checks(place)),
    ]
    for name, checks in parts:
        try:
            yield from checks()
        except Exception as error:
            yield raising(name, "what to look at", error)


def _of_plan(found: list[LoadPlan], checks: Callable[[LoadPlan], Iterator[Check]]) -> Iterator[Check]:
    """None without a pair."""
    for plan in found:
        yield from checks(plan)


def _plan_check(options: DoctorOptions, found: list[LoadPlan]) -> Iterator[Check]:
    look = partial(_plan, options, found)
    yield Check("pair", "checkpoints", look, "give --model and --spec-model that fit each other")


def _plan(options: DoctorOptions, found: list[LoadPlan]) -> Outcome:
    """What loading the pair would do; nothing is loaded."""
    pair = (options.model, options.spec_model)
    if pair == SHIPPED_PAIR and not any(all((at / name).is_dir() for name in pair) for at in (Path(), _ROOT)):
        raise NotHereError("the pair that ships is not here; give --model and --spec-model")
    spec = SpeculativeConfig(model=options.spec_model)
    config = EngineConfig(model=options.model, speculative_config=spec, skip_tokenizer_init=True)
    found.append(plan_load(config))
    return Outcome(", ".join(pair))


def kernel_checks(place: Place, *, quick: bool) -> Iterator[Check]:
    """Of those that no backend's operators show, where they run."""
    machine = Machine(place.device, torch.float32, 16, num_ranks=1)
    reason = why_not("triton", [place.shape.target.of_backend()], machine)
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

    yield from product_checks(place, quick=quick)
    yield from expert_checks(place, quick=quick)
    yield from latent_checks(place, quick=quick)
    yield from delta_checks(place, quick=quick)
    yield from step_checks(place, quick=quick)
    yield from draft_checks(place)


def _captured_checks(found: list[LoadPlan]) -> Iterator[Check]:
    """Where graphs are captured."""
    if not torch.cuda.is_available():
        yield raising("steps", "captured = launched", NotHereError(NO_GPU))
    elif found and found[0].attention_backend == "triton":
        from .capture import capture_checks

        yield from capture_checks(found[0])
    else:
        reason = "no pair, or not Triton's backend for it"
        yield raising("steps", "captured = launched", NotHereError(reason))

"""`manta doctor` finds defects, survives failing checks, and needs neither Ray nor HTTP.

`test_kernels_cases.py` tests that kernels pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manta.actors.targets.loading.resolved_config import ResolvedConfig, resolve_config
from manta.cluster.config import EngineConfig
from manta.cluster.step.scheduler_output import StepResult
from manta.drafter.compute.blocks import convolve
from manta.drafter.compute.cpu_numba import backend as loops
from manta.drafter.compute.cpu_numba import layers
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.eager.attention import paged_attention
from manta.drafter.compute.layers.linear import Linear
from manta.jobs.cli import main
from manta.jobs.doctor import doctor_run as run
from manta.jobs.doctor import pair_check as pair
from manta.jobs.doctor.cases.checks import Check, CheckOutcome, Finding, NotHereError, examine, off_by
from manta.jobs.doctor.cases.operators import operator_checks
from manta.jobs.doctor.cases.subject import MachineKind
from manta.jobs.doctor.doctor_run import kernel_checks
from support.jobs.absent import NEITHER_RAY_NOR_HTTP, run_without
from torch import Tensor

ADD, GATE, WRITE = NumbaBackend.residual_norm, layers.gate, layers.norm_rotate_write
ATTENTION = loops._NumbaAttention


def check(outcome: CheckOutcome | Exception) -> Check:
    def look() -> CheckOutcome:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Check("group", "name", look, "reboot")


@pytest.mark.parametrize(
    ("outcome", "status", "measured"),
    [
        (CheckOutcome("4 GPUs"), "fact", "4 GPUs"),
        (CheckOutcome("1 ulp", "2 ulp", passed=True), "ok", "1 ulp"),
        (CheckOutcome("3 ulp", "2 ulp", passed=False), "failed", "3 ulp"),
        (NotHereError("no GPU"), "skipped", "no GPU"),
        (
            RuntimeError("CUDA error:\n  illegal address"),
            "failed",
            "RuntimeError: CUDA error: illegal address",
        ),
    ],
)
def test_every_result_of_a_check_is_a_line(outcome: CheckOutcome | Exception, status: str, measured: str):
    found = examine(check(outcome))
    assert (found.status, found.measured) == (status, measured)
    assert found.remedy == ("reboot" if status == "failed" else "")
    assert (found.trace is not None) == isinstance(outcome, RuntimeError)


def test_errors_are_reported_in_units_of_the_results_last_place():
    exact = torch.tensor([4.0, -4.0, 0.0], dtype=torch.float64)
    assert off_by(exact.bfloat16(), exact) == 0.0
    assert off_by((exact * (1 + 2**-7)).bfloat16(), exact) == 1.0
    assert off_by(torch.tensor([4.0, float("nan"), 0.0]), exact) == float("inf")


@pytest.fixture
def machine() -> MachineKind:
    """Return a CPU's backends with operands as small as the interpreter's."""
    return replace(MachineKind.detect(), interpreted=False)


def findings(machine: MachineKind, name: str) -> Iterator[Finding]:
    """Run the named checks of compiled loops in fp32."""
    for one in operator_checks(machine, quick=True):
        if one.group == "loops" and one.name == f"{name}, float32":
            yield examine(one)


def _whatever_is_seen(*arguments: Any, **more: Any) -> Tensor:
    return paged_attention(*arguments, **{**more, "causal": False})


def _one_key_too_many(*arguments: Any, window: int | None, **more: Any) -> Tensor:
    return paged_attention(*arguments, window=None if window is None else window + 1, **more)


def _one_position_late(*given: Any) -> None:
    WRITE(*given[:7], (given[7] - 1).clamp(min=0), *given[8:])


def _without_residual(self: NumbaBackend, project: Any, x: Tensor, residual: Tensor, *norms: Any) -> Any:
    return ADD(self, project, x, torch.zeros_like(residual), *norms)


def _without_owners(x_NH: Tensor, dynamic: Tensor, base_TH: Tensor, owners_N: Tensor, *more: Any) -> Tensor:
    return convolve(x_NH, dynamic, base_TH, 0 * owners_N, *more)


# What is broken, how, and which checks must see it.
DEFECTS: list[tuple[object, str, Any, tuple[str, ...]]] = [
    (NumbaBackend, "linear", lambda self, weight, bias=None: Linear(weight * 1.0001), ("product",)),
    (NumbaBackend, "norm", lambda self, norm, x: norm(x) * 1.0001, ("norm", "target's pass")),
    (NumbaBackend, "residual_norm", _without_residual, ("residual and norm", "drafter's pass")),
    (layers, "gate", lambda x, _: GATE(x, "silu"), ("GELU product",)),
    (layers, "gate", lambda x, _: GATE(x, "gelu_tanh"), ("SiLU product", "target's pass")),
    (ATTENTION, "attend", staticmethod(_whatever_is_seen), ("attention of blocks", "target's pass")),
    (ATTENTION, "attend", staticmethod(_one_key_too_many), ("attention of blocks", "drafter's pass")),
    (layers, "norm_rotate_write", _one_position_late, ("attention of prompts", "drafter's context K/V")),
    (NumbaBackend, "convolve", staticmethod(_without_owners), ("DFlash2's convolutions",)),
]


@pytest.mark.parametrize(("owner", "name", "broken", "seen_by"), DEFECTS, ids=[d[3][0] for d in DEFECTS])
def test_a_broken_operator_is_found(
    owner: object,
    name: str,
    broken: Any,
    seen_by: tuple[str, ...],
    machine: MachineKind,
    monkeypatch: pytest.MonkeyPatch,
):
    for sound in (True, False):
        if not sound:
            monkeypatch.setattr(owner, name, broken)
        for line in seen_by:
            (found,) = findings(machine, line)
            assert found.status == ("ok" if sound else "failed"), (line, found)
            assert found.trace is None


def _elsewhere(lay_out: Any, *given: Any) -> Any:
    found = lay_out(*given)
    found.kv_slots[0][3] += 1
    return found


def _next_best(choose: Any, logits_NV: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
    ids_N, scores_N = choose(logits_NV, *given, **more)
    return (ids_N + 1) % logits_NV.shape[1], scores_N


def _one_more(accept: Any, *given: Any) -> None:
    accept(*given)
    given[-1][:, -1] += 1


def _lower_floors(choose: Any, *given: Any, **how: Any) -> Any:
    ids_N, floor_N, margins_N = choose(*given, **how)
    return ids_N, floor_N - 0.1, margins_N


def _surer(choose: Any, *given: Any, **how: Any) -> Any:
    *found, margins_N = choose(*given, **how)
    return *found, margins_N + 0.01


def _with_others_second(compute: Any, first: Any, second_N: Tensor, *more: Any, **how: Any) -> Any:
    return compute(first, second_N.roll(1, 0), *more, **how)


def _hotter(attend: Any, *given: Any, **more: Any) -> Tensor | None:
    return attend(*(1.1 * part if isinstance(part, float) else part for part in given), **more)


def _without_fold(run_rows: Any, mixed: Tensor, qkv: Tensor, given: Any, *more: Any, **how: Any) -> None:
    rows = replace(given.rows, pending_R=0 * given.rows.pending_R)
    run_rows(mixed, qkv, given._replace(rows=rows), *more, **how)


def _unnormed(gate: Any, *given: Any) -> Tensor:
    *operands, of = given
    return gate(*operands, of._replace(shape=replace(of.shape, eps=0.1)))


def instead(**wrong: object) -> Any:
    """Return a call with these values in place of those that are given."""

    def forgetful(multiply: Any, *given: Any, **how: Any) -> Tensor:
        return multiply(*given, **how | {k: v for k, v in wrong.items() if how.get(k) is not None})

    return forgetful


CASES, GPU = "manta.jobs.doctor.cases", "manta.drafter.compute.gpu_triton"
MULTIPLY, MULTIPLY_TILES = f"{GPU}.linear.projections.multiply", f"{GPU}.moe.moe.multiply_tiles"
# A function, what is done instead, and the checks that must see it.
FAULTS: list[tuple[str, Any, tuple[str, ...]]] = [
    (f"{CASES}.steps.lay_out_rows", _elsewhere, ("rows and proposals",)),
    (f"{CASES}.steps.sample_rows", _next_best, ("tokens, greedy", "tokens, Qwen3's")),
    (f"{CASES}.steps.accept_and_advance", _one_more, ("verdicts",)),
    (f"{CASES}.steps.choose", _lower_floors, ("tokens, top-p",)),
    (f"{CASES}.drafts.choose", _surer, ("margins, temperature 1",)),
    (f"{CASES}.drafts.trim_drafts", _with_others_second, ("cuts",)),
    (f"{CASES}.drafts.walk_paths", _with_others_second, ("DFlash2's paths, temperature 1",)),
    (MULTIPLY, instead(residual_NO=None), ("residual, then norm",)),
    (MULTIPLY, instead(norm=None), ("norm, then product", "norm, then SiLU product")),
    (MULTIPLY, instead(activation="silu"), ("norm, then GELU product",)),
    (MULTIPLY, instead(activation="gelu_tanh"), ("norm, then SiLU product",)),
    (MULTIPLY_TILES, instead(activation="gelu_tanh"), ("plain, SiLU",)),
    (MULTIPLY_TILES, instead(bias_EO=None), ("MXFP4, clamped",)),
    (MULTIPLY_TILES, instead(limit=1e9), ("MXFP4, clamped",)),
    (f"{GPU}.attention.mla.attend_expanded", _hotter, ("long prompts, expanded", "short prompts, expanded")),
    (f"{GPU}.attention.mla.verify_attention", _hotter, ("blocks, absorbed",)),
    (f"{GPU}.delta_net.gated_delta_net.run_rows", _without_fold, ("two value heads a key",)),
    (f"{GPU}.delta_net.gated_delta_net.gate_outputs", _unnormed, ("three value heads a key",)),
]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # as on a GPU, infinity is right there
@pytest.mark.parametrize(("function", "broken", "seen_by"), FAULTS)
def test_a_broken_kernel_is_found(
    function: str, broken: Any, seen_by: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """Sound ones pass: `test_kernels_cases.py`."""
    lines = {
        one.name.removesuffix(", float32"): one for one in kernel_checks(MachineKind.detect(), quick=True)
    }
    module, _, name = function.rpartition(".")
    monkeypatch.setattr(function, partial(broken, getattr(import_module(module), name)))
    for line in seen_by:
        found = examine(lines[line])
        assert found.status == "failed" and found.trace is None, found


def test_rates_of_experts_count_the_chosen_weights(monkeypatch: pytest.MonkeyPatch):
    from manta.jobs.doctor import rate_checks as rates

    monkeypatch.setattr(rates, "_WEIGHT_BYTES", {"cpu": 1})  # one copy
    lines = [
        one for one in rates.rate_checks(MachineKind.detect()) if one.name.startswith("experts of 16 rows")
    ]
    assert len(lines) == 6
    packed = examine(lines[-1])
    assert packed.status == "fact" and packed.measured.endswith("of the copy"), packed


@pytest.fixture
def resolved(tiny_qwen3: Path, tiny_drafter: Path) -> ResolvedConfig:
    spec = {"model": str(tiny_drafter)}
    settings = {"model": str(tiny_qwen3), "speculative_config": spec, "skip_tokenizer_init": True}
    return resolve_config(EngineConfig.from_dict({**settings, "dtype": "float32"}))


def test_an_answer_changed_by_speculation_is_found(resolved: ResolvedConfig, monkeypatch: pytest.MonkeyPatch):
    (line,) = (one for one in pair.pair_checks(resolved, quick=True) if one.name.startswith("speculation"))
    answers, heard = pair._answers, []
    monkeypatch.setattr(pair, "_answers", lambda *asked: heard.append(answers(*asked)) or heard[-1])
    assert examine(line).status == "ok" and len(heard) == 2
    said = iter(heard)

    def one_token_off(config: EngineConfig, _: Any) -> tuple[pair.Answers, int]:
        found, drafted = next(said)
        if config.speculative_config is not None:
            found[2] = (*found[2][:-1], found[2][-1] ^ 1)
        return found, drafted

    monkeypatch.setattr(pair, "_answers", one_token_off)
    found = examine(line)
    assert (found.status, found.measured) == ("failed", "1 of 4 answers differ")


def test_a_gpus_rows_are_batch_invariant_where_all_tokens_must_be_equal(
    resolved: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
):
    """Else products for few rows and for many would add up in other orders: a false alarm."""
    asked: list[tuple[str, bool]] = []

    def answers(config: EngineConfig, _: Any) -> tuple[pair.Answers, int]:
        asked.append((config.dtype, config.batch_invariant))
        return [(1,)], 1

    monkeypatch.setattr(pair, "_answers", answers)
    monkeypatch.setattr(pair, "_near_ties", lambda *_: CheckOutcome("none", passed=True))
    on_gpu = replace(resolved, device=torch.device("cuda"), dtype=torch.bfloat16)
    for line in pair.pair_checks(on_gpu, quick=True):
        if line.name.startswith("speculation"):
            examine(line)
    assert sorted(asked) == [("bfloat16", False)] * 2 + [("float32", True)] * 2


def test_tokens_may_differ_in_16_bits_at_near_ties(resolved: ResolvedConfig):
    requested = pair._Workload.of(resolved.target.vocab_size, 2, 3, greedy=True)
    prompt = requested.prompts[1]
    logits = pair._ExactLogits(resolved)._logits_after(torch.tensor(prompt).numpy())
    best, *_, worst = logits.sort(descending=True).indices.tolist()
    near = int((logits - logits[best]).abs().masked_fill(torch.arange(len(logits)) == best, 9).argmin())
    for other, passed in ((near, bool(logits[best] - logits[near] <= 0.25)), (worst, False), (best, True)):
        found = pair._near_ties(resolved, requested, [(1, 2), (best, 5)], [(1, 2), (other, 5)])
        assert found.passed == passed, found


def test_the_table_shows_failures_and_remedies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def checks(_: object) -> Iterator[Check]:
        yield check(CheckOutcome("reads [gpu]"))
        yield check(KeyError("no such kernel"))

    monkeypatch.setattr(run, "_checks", checks)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--verbose", "-o", str(tmp_path / "out" / "report.json")])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "[gpu]" in said and "no such kernel" in said and "What to do: reboot." in said
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["failed"] == 1 and "KeyError" in report["findings"][1]["trace"]


def test_a_healthy_machine_is_six_lines_and_a_failure_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [("machine", "CPU"), ("machine", "cores"), ("machine", "GPU"), ("machine", "PyTorch")]
    names += [("machine", "Ray"), ("Manta uses", "dtype"), ("Manta uses", "not torch")]
    findings = [Finding(group, name, "fact", f"<{name}>") for group, name in names]
    findings += [Finding("loops", str(i), "ok", "1 ulp") for i in range(7)]
    findings += [Finding("steps", "kernels", "skipped", "no GPU"), Finding("rates", "copy", "fact", "9 GB/s")]
    report = {"findings": [asdict(each) for each in findings], "failed": 0}
    run.print_report(report, verbose=False)
    assert capsys.readouterr().out.splitlines() == [
        "machine: <CPU>, cores <cores>, GPU <GPU>",
        "software: PyTorch <PyTorch>, Ray <Ray>",
        "Manta uses: <dtype>",
        "checks: 7 passed, 1 are not for this machine",
        "measured: copy 9 GB/s",
        "Nothing failed of 16 lines, in 0 s; --verbose shows each.",
    ]
    bad = Finding("loops", "norm", "failed", "9 ulp", remedy="reboot")
    run.print_report({"findings": [asdict(each) for each in (*findings, bad)], "failed": 1}, verbose=False)
    said = capsys.readouterr().out
    assert "loops: norm failed (9 ulp). What to do: reboot." in said and "1 failed of 17 lines" in said


def test_a_part_whose_description_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> Iterator[Check]:
        raise ImportError("libtriton.so is not for this machine")

    for part in ("machine_checks", "operator_checks", "kernel_checks", "_captured_checks", "rate_checks"):
        monkeypatch.setattr(run, part, broken)
    report = run.run_doctor(run.DoctorOptions(model="nowhere/at all", spec_model="models/drafter"))
    assert [finding["status"] for finding in report["findings"]] == ["failed"] * 6
    assert report["failed"] == 6


def test_a_limit_of_time_loses_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def ended(options: run.DoctorOptions) -> Iterator[Check]:
        yield from list(run.machine_checks())[:2]
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_checks", ended)
    with pytest.raises(KeyboardInterrupt):
        run.run_doctor(run.DoctorOptions(output=tmp_path / "out" / "report.json"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["findings"]) == 2 and report["failed"] == 0


def test_neither_ray_nor_http_is_needed_and_a_healthy_cpu_passes(tmp_path: Path):
    output = tmp_path / "report.json"
    flags = ["doctor", "--quick", "--json", "-o", str(output)]
    done = run_without(NEITHER_RAY_NOR_HTTP, flags, TRITON_INTERPRET="")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    report = json.loads(output.read_text())
    assert json.loads(done.stdout) == report and report["failed"] == 0
    lines = {(f["group"], f["name"]): f for f in report["findings"]}
    assert lines["machine", "Ray"]["measured"].startswith("not installed")
    assert lines["steps", "kernels"]["measured"] == "triton runs on GPUs"
    assert lines["pair", "speculation on = off, float32"]["status"] == "ok"
    assert {"loops", "torch", "rates", "Manta uses"} <= {group for group, _ in lines}


def test_captured_steps_must_give_the_tokens_and_pages_of_launched_ones():
    """The captured steps themselves need a GPU; results are stand-ins here."""
    from manta.jobs.doctor.cuda_graph_check import _compare

    def seen(token: int, count: int = 2, value: float = 0.3) -> tuple[list[StepResult], list[Tensor]]:
        step = StepResult(0, np.array([[5, token], [7, -1]], np.int32), np.array([count, 1], np.int32))
        return [step, step], [torch.ones(2, 3), torch.full((2, 3), value)]

    assert _compare(seen(6), seen(6)).passed
    assert _compare(seen(6), seen(8)).measured == "2 tokens differ, K/V by 0 ulp"
    for other in (seen(8), seen(6, count=1), seen(6, value=0.301)):
        assert not _compare(seen(6), other).passed

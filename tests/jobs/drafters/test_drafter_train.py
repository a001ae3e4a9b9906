"""`manta drafter train`: any target, any data, several workers; a kill changes no bit."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from manta.actors.capture.records import CapturedRecord, segment_path
from manta.actors.targets.families import read_model
from manta.actors.targets.model.model_spec import ModelSpec
from manta.actors.tokenization.prompts import Chat, encode_prompt
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.actors.workers.comm import process_group
from manta.cluster.errors import ConfigError, DatasetError
from manta.drafter.dflash.checkpoint import check_drafter
from manta.jobs.drafters.train.train_data import AnswerSettings, gather, prompt_ids, prompt_rows
from manta.jobs.drafters.train.train_run import TrainOptions, train_drafter
from manta.jobs.training.heads.dflash_module import TrainableDrafter
from manta.jobs.training.heads.frozen_target import FrozenTarget
from manta.jobs.training.heads.initialization import facts_of
from manta.jobs.training.loop.training_curves import read_rows
from manta.jobs.training.loop.training_loop import CURVES, Length
from manta.jobs.training.train_drafter import train
from safetensors.torch import load_file
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target, transformers_model
from support.checkpoints.training_targets import CPU, continuations, small_config, write_target
from support.jobs import training_run
from support.jobs.training_run import SETTINGS, run, weights_after_some_steps
from support.paths import MODELS, module_command

pytestmark = pytest.mark.usefixtures("one_thread")  # as their processes

NUM_STEPS = 6
WHOLE = pytest.mark.if_changed


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_target(tmp_path_factory.mktemp("target"))
    continuations().save(folder / training_run.DATA)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train without a kill."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(target, folder, Length(steps=NUM_STEPS))
    return folder


def start(*arguments: object) -> subprocess.Popen[str]:
    command = module_command("support.jobs.training_run", [*map(str, arguments)])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def same_weights(one: Path, other: Path) -> bool:
    of_one, of_other = (torch.load(each / "snapshot.pt", weights_only=True) for each in (one, other))
    states = [(of_one["model"], of_other["model"])]
    states.append((of_one["average"]["weights"], of_other["average"]["weights"]))
    states.append(tuple(load_file(each / "drafter/model.safetensors") for each in (one, other)))
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in states)


def test_a_killed_run_ends_with_the_same_weights(target: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """The process gets SIGKILL at a random moment after a number of lines, and is then run to the end."""
    process = start("run", target, tmp_path, NUM_STEPS)
    assert process.stdout is not None
    for _ in range(random.randint(4, 8)):
        process.stdout.readline()
    process.kill()
    process.communicate()
    assert (tmp_path / CURVES).exists()
    run(target, tmp_path, Length(steps=NUM_STEPS))
    assert same_weights(uninterrupted, tmp_path)
    steps = [row["step"] for row in read_rows(tmp_path / CURVES) if "loss" in row]
    assert steps == list(range(NUM_STEPS)), "each step is told once"
    losses = [row["loss"] for row in read_rows(tmp_path / CURVES) if "loss" in row]
    assert losses == [row["loss"] for row in read_rows(uninterrupted / CURVES) if "loss" in row]


@WHOLE
def test_steps_of_a_timed_run_are_repeated_identically(target: Path, tmp_path: Path) -> None:
    """Only the curves and the outputs of a timed run are left, as after a kill before its first snapshot."""
    one, other = tmp_path / "one", tmp_path / "other"
    trained = run(target, one, Length(seconds=1.0))
    shutil.copytree(one / "outputs", other / "outputs")
    shutil.copyfile(one / CURVES, other / CURVES)
    again = run(target, other, Length(seconds=1.0))
    assert trained.num_steps == again.num_steps and same_weights(one, other)


def test_a_folder_of_another_run_is_refused(target: Path, uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copyfile(uninterrupted / "snapshot.pt", tmp_path / "snapshot.pt")
    data = continuations(8)
    with pytest.raises(ConfigError, match="another run"):
        train(target, data, data, tmp_path, Length(steps=2), settings=SETTINGS, mask_token_id=63)


@pytest.mark.slow
def test_two_workers_average_their_gradients_and_have_the_same_weights(tmp_path: Path) -> None:
    """The reference is one process whose loss is the mean of both parts."""
    store = process_group.open_store(2)
    other = start("worker", tmp_path, store.port)
    process_group.connect(rank=0, world_size=2, device=CPU, store=store)
    workers = process_group.joined()  # as under Ray Train, which connects them itself
    ours = weights_after_some_steps(tmp_path / "run", (0,), workers)
    workers.close()
    other.communicate(timeout=600)
    assert other.returncode == 0
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    alone = weights_after_some_steps(tmp_path / "alone", parts=(0, 1))
    torch.manual_seed(0)
    initial_state = TrainableDrafter(small_config()).state_dict()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        # Muon orthogonalizes in bf16: the same sums in another order move a weight by a little of a step.
        torch.testing.assert_close(tensor, alone[name], atol=2e-4, rtol=0.0)
        assert name.endswith("norm.weight") or not torch.equal(tensor, initial_state[name])
    assert len(read_rows(tmp_path / "run" / CURVES)) == 3, "worker 0 alone writes"


@pytest.mark.parametrize(
    "family", ["gemma3", pytest.param("deepseek_v3", marks=WHOLE), pytest.param("qwen3_next", marks=WHOLE)]
)
def test_features_equal_the_targets_own_in_every_family(family: str, tmp_path: Path) -> None:
    """Some families have windows and a scaled embedding, latents and experts, or states of a delta rule."""
    folder = make_tiny_target(tmp_path, family)
    frozen = FrozenTarget(folder, (2, 0), max_tokens=40, device=CPU)
    model = transformers_model(folder)
    for seed, num_tokens in ((0, 30), (1, 19)):
        tokens = torch.randint(0, 128, (2, num_tokens), generator=torch.Generator().manual_seed(seed))
        features, hidden = frozen.read(tokens)
        logits = frozen.logits(hidden.flatten(0, 1)).view(2, num_tokens, -1)
        with torch.no_grad():
            expected = model(tokens, output_hidden_states=True)
        torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=1e-4)
        taps = torch.cat([expected.hidden_states[i + 1] for i in (2, 0)], dim=-1)
        torch.testing.assert_close(features, taps, atol=1e-4, rtol=1e-4)


@WHOLE
def test_a_drafter_is_trained_for_a_target_of_other_blocks(tmp_path: Path) -> None:
    """Tensors of latent attention and experts that do not fit start at random."""
    folder = make_tiny_target(tmp_path / "target", "deepseek_v3")
    data = continuations(vocab_size=128)
    settings = replace(SETTINGS, conv_group_size=None, selector=None)
    how = {"settings": settings, "mask_token_id": 127}
    trained = train(folder, data, data, tmp_path / "run", Length(steps=2), **how)
    config = check_drafter(trained.drafter, facts_of(read_model(folder)))
    assert (config.mask_token_id, config.block_size, config.num_layers) == (127, 4, 1)


def test_a_drafter_trained_further_keeps_its_shape_or_gets_layers_and_loses_none(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    initial = make_tiny_drafter(tmp_path / "drafter", sliding_window=24)
    facts, data = facts_of(read_model(tiny_qwen3)), continuations(vocab_size=120)
    was = check_drafter(initial, facts)

    def further(num_layers: int | None, steps: int) -> Path:
        settings, folder = replace(SETTINGS, num_layers=num_layers), tmp_path / f"{num_layers}"
        run = (tiny_qwen3, data, data, folder, Length(steps=steps))
        return train(*run, settings=settings, initial=initial).drafter

    same = check_drafter(further(None, 1), facts)
    assert (same.layers, same.block_size, was.block_size) == (was.layers, 16, 16)
    assert same.selector == SETTINGS.selector, "and what the recipe adds"
    more = further(was.num_layers + 2, 2)
    assert check_drafter(more, facts).layers == was.layers + was.layers[-1:] * 2
    learned = load_file(more / "model.safetensors")
    assert learned[f"layers.{was.num_layers + 1}.mlp.down_proj.weight"].any(), "it is silent no more"
    fewer = was.num_layers - 1
    with pytest.raises(ConfigError, match=rf"layers={fewer}: .* has {was.num_layers} layers, and none"):
        further(fewer, 1)


def text_records() -> list[dict[str, object]]:
    return [
        {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Never seen"}]},
        {"prompt": "def read(path):"},
        {"text": "import os\n" * 60},
        {"prompt_token_ids": [5, 6], "token_ids": [7, 8, 9]},
    ]


def test_prompts_are_answered_again_and_texts_are_used_unchanged(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, text_records()[:3])))
    pq.write_table(pa.Table.from_pylist(text_records()[3:]), tmp_path / "rows.parquet")
    captured = tmp_path / "captured"
    captured.mkdir()
    segment_path(captured, 1).write_bytes(CapturedRecord((), (3, 4, 5), "m", "2026-11-23").line() + b'{"day')
    tokenizer = Tokenizer.load(MODELS / "target")
    asking = AnswerSettings(str(MODELS / "target"), tokenizer, max_tokens=4, longest=600)
    places = [str(lines), str(tmp_path / "rows.parquet"), str(captured)]
    data = gather(places, asking, tmp_path / "answers", report=lambda _: None)
    texts = [
        (tokenizer.decode(ids[:first].tolist(), skip_special_tokens=False), ids[first:].tolist())
        for ids, first in (
            (data.ids[data.bounds[i] : data.bounds[i + 1]], data.first[i]) for i in range(len(data))
        )
    ]
    taken, requested = texts[:-2], texts[-2:]
    assert [answer for _, answer in taken[-2:]] == [[7, 8, 9], [4, 5]]
    assert taken[0][0].startswith("import os") and len(taken) == 3
    assert (
        "What?" in requested[0][0]
        and "Never seen" not in requested[0][0]
        and requested[1][0] == "def read(path):"
    )
    assert all(2 <= len(answer) <= 4 for _, answer in requested)


def test_texts_are_chats_where_the_target_has_a_template(tiny_qwen3: Path) -> None:
    target, question = str(MODELS / "target"), {"role": "user", "content": "What?"}
    tokenizer = Tokenizer.load(MODELS / "target")
    chat = encode_prompt(Chat([question]), tokenizer).token_ids
    text = encode_prompt("What?", tokenizer).token_ids
    by_default, raw = prompt_rows(target, None), prompt_rows(target, chat=False)
    answered = [question, {"role": "assistant", "content": "Never seen"}]
    for record, rows, expected in (
        ({"prompt": "What?"}, by_default, chat),
        ({"prompt": "What?"}, raw, text),
        ({"prompt": list(text)}, by_default, text),
        ({"messages": answered}, raw, chat),
        ({"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "."}]}, raw, chat),
        ({"text": "What?"}, by_default, None),
        ({"prompt": None, "text": "What?"}, by_default, None),
    ):
        assert prompt_ids(record, rows, tokenizer) == expected, record
    assert not prompt_rows(str(tiny_qwen3), None).chat
    with pytest.raises(ConfigError, match="no chat template"):
        prompt_rows(str(tiny_qwen3), chat=True)
    with pytest.raises(DatasetError, match="messages"):
        prompt_ids({"messages": [{"role": "nobody"}]}, raw, tokenizer)


def captured_line(model: str) -> str:
    return CapturedRecord((1,), (3, 4, 5), model, "2026-11-23").line().decode()


@pytest.mark.parametrize(
    ("name", "lines", "complaint"),
    [
        ("rows.jsonl", "{\n", "record 1"),
        ("rows.jsonl", '{"question": "x"}\n', "messages, prompt or text.*question"),
        (None, captured_line("m") + captured_line("n"), "several models"),
    ],
)
def test_unusable_training_text_is_named(
    name: str | None, lines: str, complaint: str, tmp_path: Path
) -> None:
    path = segment_path(tmp_path, 1) if name is None else tmp_path / name
    path.write_text(lines)
    asking = AnswerSettings("nowhere", None, max_tokens=4, longest=100)
    with pytest.raises(DatasetError, match=complaint):
        gather([str(path if name else tmp_path)], asking, tmp_path / "answers", report=lambda _: None)


def options(target: Path, folder: Path, **changes: object) -> TrainOptions:
    rows = folder.parent / "rows.jsonl"
    rows.write_text("\n".join([json.dumps(text_records()[3])] * 40))
    fixed = {"target": str(target), "data": (str(rows),), "folder": folder, "steps": 2, "mask_token_id": 63}
    return TrainOptions(**fixed | changes)


def test_the_command_writes_a_checkpoint_with_its_card(target: Path, tmp_path: Path) -> None:
    reported: list[str] = []
    trained = train_drafter(options(target, tmp_path / "run", layers=1, block_size=4), reported.append)
    spec: ModelSpec = read_model(target)
    assert check_drafter(trained.drafter, facts_of(spec)).block_size == 4
    assert "manta drafter train" in (trained.drafter / "README.md").read_text()
    assert any("tokens per step before" in line for line in reported)
    assert reported[-1].startswith("not useful yet: 1."), "a step or two make no drafter"


def test_outputs_recorded_with_the_answers_are_not_computed_again(tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"def read_{number}(path):"}) for number in range(24)))
    shape = {"layers": 1, "block_size": 4, "mask_token_id": None, "max_tokens": 6, "data": (str(rows),)}
    reported: list[str] = []
    run = options(MODELS / "target", tmp_path / "run", **shape)
    assert train_drafter(run, reported.append).num_steps == 2
    assert [*run.folder.glob("answers/part-000000.outputs/taps.npy")]
    assert not [*run.folder.glob("outputs/*.outputs")], reported
    assert any(
        re.fullmatch(r"time: .* for answers, 0 s for .* outputs, .* for training", line) for line in reported
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hours": 1.0}, "steps or as time"),
        ({"steps": 0}, "must be above 0"),
        ({"initial": str(MODELS / "drafter"), "block_size": 8}, "has its own"),
    ],
)
def test_contradictory_options_are_refused(
    changes: dict[str, object], complaint: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        train_drafter(options(target, tmp_path / "run", **changes))


def test_more_data_can_be_given_where_there_was_too_little(tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"def read_{number}(path):"}) for number in range(24)]
    shape = {"layers": 1, "block_size": 4, "mask_token_id": None, "max_tokens": 6, "data": (str(rows),)}
    run = options(MODELS / "target", tmp_path / "run", **shape)
    rows.write_text("\n".join(lines[:4]))
    with pytest.raises(DatasetError, match="4 usable rows are fewer than"):
        train_drafter(run, lambda _: None)
    assert not list((tmp_path / "run").glob("answers/*")), "said before anything is answered"
    rows.write_text("\n".join(lines))
    assert train_drafter(run, lambda _: None).num_steps == 2


def test_missing_data_is_refused_before_the_target_is_read(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"missing\.jsonl"):
        train_drafter(options(tmp_path / "nowhere", tmp_path / "run", data=("missing.jsonl",)))


@pytest.mark.slow
def test_a_ray_train_job_trains_as_its_workers_would_alone(target: Path, tmp_path: Path) -> None:
    """Two workers communicate over gloo, on cores."""
    import ray

    try:
        trained = train_drafter(options(target, tmp_path / "run", layers=1, block_size=4, workers=2))
    finally:
        ray.shutdown()
    assert trained.num_steps == 2 and (trained.drafter / "model.safetensors").exists()

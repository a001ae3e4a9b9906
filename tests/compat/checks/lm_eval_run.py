"""lm-eval on its own tasks with local data: nothing is downloaded."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from trial import API, FOLDER, MODEL, TARGET, check, command, main

DOCUMENTS = [
    {"question": "def add(a, b):\n    return a", "choices": [" + b", " banana"], "gold": 0, "text": " + b"},
    {"question": "import os\nprint(os.", "choices": ["path)", "banana)"], "gold": 0, "text": "path)"},
    {"question": "for i in range(", "choices": ["10):", "banana"], "gold": 0, "text": "10):"},
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
TASKS = {
    "compat_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "compat_choice": {
        "output_type": "multiple_choice",
        "doc_to_target": "gold",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}],
    },
}


def write_tasks() -> None:
    data = FOLDER / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        whole = {**COMMON, "task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}, **task}
        (FOLDER / f"{name}.yaml").write_text(json.dumps(whole))  # which is YAML


def evaluate(kind: str, task: str, path: str, batch: int = 1, **arguments: object) -> dict[str, float]:
    """Results of a task; checks that all documents were answered."""
    out = Path(tempfile.mkdtemp(dir=FOLDER))
    given = {"model": MODEL, "base_url": f"{API}/{path}", "num_concurrent": 2, "max_retries": 1, **arguments}
    command(
        "lm_eval",
        "run",
        *("--model", kind, "--model_args", ",".join(f"{name}={value}" for name, value in given.items())),
        *("--batch_size", str(batch)),
        *("--tasks", task, "--include_path", str(FOLDER), "--output_path", str(out), "--log_samples"),
        *(["--apply_chat_template"] if "chat" in kind else []),
    )
    (samples,) = out.rglob("samples_*.jsonl")
    assert len(samples.read_text().splitlines()) == len(DOCUMENTS)
    (results,) = out.rglob("results_*.json")
    return json.loads(results.read_text())["results"][task]


@check("local-completions: generate_until")
def generate() -> None:
    assert "exact_match,none" in evaluate(
        "local-completions", "compat_generate", "completions", tokenizer=TARGET
    )


@check("local-completions: loglikelihood (echo with logprobs), one prompt and four at a time")
def loglikelihood() -> None:
    """The choices are so different that a model of code cannot miss them if the prompt is right."""
    for batch in (1, 4):
        found = evaluate("local-completions", "compat_choice", "completions", tokenizer=TARGET, batch=batch)
        assert found["acc,none"] == 1.0, found


@check("local-completions: loglikelihood with texts in place of token ids")
def texts() -> None:
    found = evaluate(
        "local-completions", "compat_choice", "completions", tokenizer=TARGET, tokenized_requests=False
    )
    assert found["acc,none"] == 1.0, found


@check("local-chat-completions: generate_until")
def chat() -> None:
    found = evaluate("local-chat-completions", "compat_generate", "chat/completions")
    assert "exact_match,none" in found


write_tasks()
main()

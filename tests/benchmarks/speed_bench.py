"""`speed-bench`: writes published prompts as a file for every benchmark (`--prompts`).

SPEED-Bench (arXiv:2604.09557) is NVIDIA's and licensed for evaluation only. It is downloaded with the user's
own access, its license is named, and none of it is stored in this repository. For many rows the hub has a
placeholder instead of a prompt that others own. NVIDIA's `specdec_bench` (prepare_data.py) fills those in,
and its output can be used here instead of the hub's file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as pq
import typer
from manta.actors.system.atomic_files import write_atomically
from manta.cluster.config import one_of
from manta.cluster.errors import DatasetError
from manta.jobs.bench.common.engine_passes import say
from manta.jobs.common.tables import print_table

SPEED_BENCH = "nvidia/SPEED-Bench"
SUBSETS = ("qualitative", *(f"throughput_{size}" for size in ("1k", "2k", "8k", "16k", "32k")))
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_LICENSE = (
    "SPEED-Bench is under the NVIDIA Evaluation Dataset License and its sources' own: for evaluation only. "
    "Do not redistribute it or train on it. The text: https://huggingface.co/datasets/nvidia/SPEED-Bench"
)
Row = Mapping[str, Any]  # Any: content of a file


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prompts written by category; `left_out` rows had a placeholder or no prompt."""

    path: Path
    categories: Mapping[str, int]
    left_out: int


def main(
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file for the prompts.")] = Path(
        "speed-bench.jsonl"
    ),
    subset: Annotated[
        str, typer.Option("--subset", help="qualitative, or throughput_1k .. 32k.")
    ] = "qualitative",
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Output of NVIDIA's prepare_data.py (default: the hub's file)."),
    ] = None,
) -> None:
    """Download SPEED-Bench with your Hugging Face account (HF_TOKEN); for evaluation only."""
    one_of("subset", subset, SUBSETS)
    done = prepare_speed_bench(subset, output, source)
    rows = [[name, str(count)] for name, count in done.categories.items()]
    print_table(f"{sum(done.categories.values())} prompts in {done.path}", ["category", "prompts"], rows)
    if done.left_out:
        print(
            f"{done.left_out} rows have no prompt on the hub. NVIDIA's specdec_bench (prepare_data.py) makes "
            "the complete set; give its file with --from."
        )


def prepare_speed_bench(subset: str, output: Path, source: Path | None = None) -> Prepared:
    """Write a line {id, category, messages} for each row's first turn, of the hub's file or `source`."""
    say(_LICENSE)
    file = source or _download(subset)
    rows = list(_read(file))
    lines = [line for i, row in enumerate(rows) if (line := _line(row, i)) is not None]
    if not lines:
        raise DatasetError(
            f"prompts: {file} has {len(rows)} rows, none with a prompt. Make the set with NVIDIA's "
            "specdec_bench (prepare_data.py) and give its file with --from.",
            param="prompts",
        )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, lambda target: target.write_text(text, encoding="utf-8"))
    counted = Counter(line["category"] for line in lines)
    return Prepared(output, dict(sorted(counted.items())), len(rows) - len(lines))


def _line(row: Row, number: int) -> dict[str, Any] | None:
    messages = row.get("messages") or [{"role": "user", "content": t} for t in (row.get("turns") or ())[:1]]
    content = str(messages[0].get("content") or "") if messages else ""
    if not content.strip() or _PLACEHOLDER in content:
        return None
    return {
        "id": str(row.get("question_id") or number),
        "category": str(row.get("category") or "all"),
        "messages": [{"role": "user", "content": content}],
    }


def _read(file: Path) -> Iterator[Row]:
    try:
        if file.suffix == ".parquet":
            yield from pq.read_table(file).to_pylist()
            return
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip():
                yield json.loads(line)
    except (OSError, ValueError) as error:  # pyarrow raises ValueErrors
        raise DatasetError(
            f"prompts: {file} cannot be read: {_first_line(error)}.", param="prompts"
        ) from None


def _download(subset: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = [
            f"{subset}/*.parquet",
            f"data/{subset}*.parquet",
            f"data/{subset}/*.parquet",
        ]
        folder = Path(snapshot_download(SPEED_BENCH, repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub client's errors all derive from these
        raise DatasetError(
            f"prompts: {SPEED_BENCH} could not be downloaded ({_first_line(error)}). Check the network and "
            "HF_TOKEN, or download it elsewhere and give the file of the subset with --from.",
            param="prompts",
        ) from None
    return _only(sorted(folder.rglob("*.parquet")), subset)


def _only(files: Sequence[Path], subset: str) -> Path:
    mine = [file for file in files if subset in file.parts or file.name.startswith(subset)]
    if len(mine) != 1:
        raise DatasetError(
            f"prompts: {SPEED_BENCH} has {len(mine)} files of {subset}, expected 1. Download it and give the "
            "file with --from.",
            param="prompts",
        )
    return mine[0]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")

"""Specification of a job: settings its results depend on, input and output. Checks whether it may resume.

The fingerprint is a hash of what results depend on, without the drafter, which does not change them.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from ....cluster.batch.row_ranges import RowRanges
from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ....drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from ...checkpoints.checkpoint_paths import target_folder, tokenizer_folder
from ...checkpoints.gguf_files import gguf_files
from .output_index import OutputIndex
from .output_parts import Json, OutputForm

MAX_VALUE = 80  # characters of a setting in a message
NAMED_FILES = 3  # in a message; other files are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """All fields but `form` are JSON.

    Attributes:
        made_from: what results depend on, by name: model and revision, tokenizer, sampling, template, seed.
        input: name, size, modification time and content hash of every file (`Dataset.identity`).
        sample: the rows to answer; all if absent.
        rows_per_shard: set if order is preserved. May differ in a later run: the end of the job corrects it.
        about: reported in the manifest, and free to differ between runs: drafter, number of engines.
    """

    made_from: Mapping[str, Any]
    input: Sequence[Mapping[str, Any]]
    input_format: str
    form: OutputForm
    num_rows: int
    sample: RowRanges | None = None
    rows_per_shard: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        text = json.dumps(_plain(self.made_from), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def rows(self) -> RowRanges:
        return ((0, self.num_rows),) if self.sample is None else self.sample

    def to_json(self) -> Json:
        return _plain(
            {
                "fingerprint": self.fingerprint,
                "made_from": self.made_from,
                "input_format": self.input_format,
                "output": self.form.as_json(),
                "num_rows": self.num_rows,
                "sample": self.sample,
                "rows_per_shard": self.rows_per_shard,
                "about": self.about,
                "input": list(self.input),
            }
        )

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        return self.other_settings(before) + self.other_input(before)

    def other_settings(self, before: Mapping[str, Any]) -> list[str]:
        return _changes(before["made_from"], _plain(self.made_from))

    def other_input(self, before: Mapping[str, Any]) -> list[str]:
        old = {file["name"]: file for file in before["input"]}
        new = {file["name"]: file for file in _plain(list(self.input))}
        words = [_file_change(name, old.get(name), new.get(name)) for name in sorted({*old, *new})]
        changes = [word for word in words if word]
        if not changes and before["num_rows"] != self.num_rows:
            changes = [f"input: {before['num_rows']:,} rows before, {self.num_rows:,} now"]
        if len(changes) > NAMED_FILES:
            return [*changes[:NAMED_FILES], f"{len(changes) - NAMED_FILES} other files"]
        return changes

    def check_resume(self, where: str, before: Mapping[str, Any], *, force: bool) -> None:
        """Raise ConfigError for another format or, unless `force`, other settings or another input."""
        if other := _changes(before["output"], self.to_json()["output"], "output "):
            raise ConfigError(
                f"output: {where} has results in another format: {'; '.join(other)}. Choose another output, "
                "or replace it with --overwrite.",
                param="output",
            )
        differences = self.differences(before)
        if differences and not force:
            raise ConfigError(
                f"output: {where} belongs to a job with other settings: {'; '.join(differences)}. Use the "
                "same settings, choose another output, continue anyway with --force-resume, or replace it "
                "with --overwrite.",
                param="output",
            )


def check_parts(where: str, index: OutputIndex, replaced: Collection[str]) -> None:
    """Raise ConfigError if a part is not this job's, or `replaced`, or has another size than was written."""
    if foreign := [name for name in index.unrecorded if name not in replaced]:
        raise ConfigError(
            f"output: {_named(foreign)} in {where} was not written by this job. Move it away, choose another "
            "output, or replace all results with --overwrite.",
            param="output",
        )
    for record in (*index.records.values(), *index.stale.values()):
        if (size := index.files[record.part]) != record.num_bytes:
            raise ConfigError(
                f"output: {record.part} in {where} has {size:,} bytes where {record.num_bytes:,} were "
                "written. Remove it: its rows are answered again.",
                param="output",
            )


def not_empty(where: str, files: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"output: {where} is not empty ({_named(files) or 'a job has started there'}). Choose another "
        "output, or replace its results with --overwrite.",
        param="output",
    )


def _named(files: Sequence[str]) -> str:
    more = len(files) - NAMED_FILES
    return ", ".join([*sorted(files)[:NAMED_FILES], *([f"{more} more"] if more > 0 else [])])


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    changes: list[str] = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += _changes(old, new, f"{prefix}{name}.")
        elif old != new:
            changes.append(f"{prefix}{name}: {_shown(old)} before, {_shown(new)} now")
    return changes


def _shown(value: Any) -> str:
    return "none" if value is None else textwrap.shorten(str(value), MAX_VALUE, placeholder=" ...")


def _file_change(name: str, before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str | None:
    if before == now:
        return None
    if before is None:
        return f"{name}: new"
    if now is None:
        return f"{name}: missing"
    if before["size"] != now["size"]:
        return f"{name}: {before['size']:,} bytes before, {now['size']:,} now"
    for kind in {"sha256", "sampled"} & before.keys() & now.keys():
        old, new = before[kind], now[kind]
        if old != new:
            return f"{name}: other content of the same size (SHA-256 {old[:12]}... before, {new[:12]}... now)"
        if kind == "sha256":
            return None  # the file's modification time does not matter
    if before.get("modified") != now.get("modified"):
        return f"{name}: modified {_time(before.get('modified'))} before, {_time(now.get('modified'))} now"
    return None


def _time(modified: Any) -> str:
    if isinstance(modified, int | float):
        return f"{datetime.fromtimestamp(modified, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return str(modified)


SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
PROBE_BYTES = 65536  # read at the beginning, middle and end of a file of weights


def model_identity(config: EngineConfig) -> dict[str, Any]:  # Any: JSON
    """Return what identifies the model, without the drafter, which does not change results."""
    target, tokenizer = target_folder(config), tokenizer_folder(config)
    return {
        "model": checkpoint_identity(target),
        "tokenizer": None if tokenizer == target else checkpoint_identity(tokenizer),
        **settings_identity(config),
    }


def checkpoint_identity(folder: Path) -> str:
    """Return a digest of a checkpoint's small files, and of sizes and probes of its weights."""
    if files := gguf_files(folder):
        return _gguf_identity(files)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            if path.suffix == ".safetensors":
                _probe(file, size, digest)
            else:
                digest.update(file.read())
    return digest.hexdigest()


def _gguf_identity(files: Sequence[Path]) -> str:
    """Return a digest of headers, and of sizes and probes: the folder's own files follow from the headers."""
    digest = hashlib.sha256()
    tensors = GgufFile(files[0]).tensors.values()
    for part, path in enumerate(files):
        size = path.stat().st_size
        digest.update(f"{size}\n".encode())
        with path.open("rb") as file:
            digest.update(
                file.read(min((info.offset for info in tensors if info.part == part), default=size))
            )
            _probe(file, size, digest)
    return digest.hexdigest()


def _probe(file: BinaryIO, size: int, digest: hashlib._Hash) -> None:
    for begin in sorted({0, size // 2, max(size - PROBE_BYTES, 0)}):
        file.seek(begin)
        digest.update(file.read(PROBE_BYTES))


def settings_identity(config: EngineConfig) -> dict[str, Any]:  # Any: JSON
    """Return the settings, if set, that change the chat template, grammars, config.json or the weights."""
    found: dict[str, Any] = {}
    if config.chat_template is not None:
        found["chat_template"] = hashlib.sha256(Path(config.chat_template).read_bytes()).hexdigest()
    if config.default_chat_template_kwargs:
        found["default_chat_template_kwargs"] = dict(config.default_chat_template_kwargs)
    if config.structured_outputs_config:
        found["structured_outputs_config"] = dict(config.structured_outputs_config)
    if config.split_special_tokens:
        found["split_special_tokens"] = True
    if config.hf_overrides:
        found["hf_overrides"] = dict(config.hf_overrides)
    if config.load_format != "auto":
        found["load_format"] = config.load_format
    return found

"""The process that writes captured traffic: it reads lines and replies with the outcome of each.

    python -m manta.actors.capture.writer_process '{"folder": "...", "max_bytes": 1073741824, ...}'
    stdin    lines as in `records.py`
    stdout   `ready`, or `refused` and the reason; then the outcome of each line: kept, redacted, failed,
             too_large, full. The first failure of a kind is followed by its reason.

Low priority (nice 19), so that neither a slow hook nor a slow disk delays a step. Ends with its input.
Imports neither torch nor Ray.

Segment files form a ring: at most 16 of a sixteenth of the limit each, the oldest removed first. Replicas may
share a folder: each writes a segment of its own, which it keeps locked (flock), and removes the oldest one
that no process writes when it starts another. After a restart the newest one without a writer is continued.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ...cluster.errors import ConfigError, MantaError
from ..system.atomic_files import open_own
from ..tokenization.tokenizer import Tokenizer
from .records import CapturedRecord, parse_line, segment_number, segment_path, segments

# Any: the return value of the operator's code.
Hook: TypeAlias = Callable[[dict[str, Any]], Any]


class RedactionError(MantaError):
    """The hook failed or did not return a record. Quotes nothing of the record."""


def load_hook(name: str) -> Hook:
    module, _, function = name.partition(":")
    try:
        hook = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing a module may raise anything
        raise _wrong(name, f"{type(error).__name__}: {error}") from None
    if not callable(hook):
        raise _wrong(name, "it is not a function")
    return hook


def redacted(record: CapturedRecord, hook: Hook, tokenizer: Tokenizer) -> CapturedRecord | None:
    """Return the record as the hook leaves it; None if it must not be stored. Raises RedactionError."""
    texts = {
        "prompt": tokenizer.decode(record.prompt_token_ids, skip_special_tokens=False),
        "answer": tokenizer.decode(record.token_ids, skip_special_tokens=False),
    }
    metadata = {name: getattr(record, name) for name in ("model", "day", "tenant", "category")}
    try:
        returned = hook({**texts, **metadata})
    except Exception as error:  # the message of the operator's exception may quote private text
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RedactionError(f"{type(error).__name__} in line {place.lineno} of {place.filename}") from None
    if returned is None:
        return None
    return _read_returned(returned, record, texts, tokenizer)


def _read_returned(
    returned: object, record: CapturedRecord, texts: Mapping[str, str], tokenizer: Tokenizer
) -> CapturedRecord:
    if not isinstance(returned, Mapping):
        raise RedactionError(f"it returned {type(returned).__name__}: return the record or None")
    for name in texts:
        if not isinstance(returned.get(name), str):
            raise RedactionError(f"the returned record has no text {name!r}")
    for name in ("tenant", "category"):
        if not isinstance(returned.get(name), str | None):
            raise RedactionError(f"{name} of the returned record is neither text nor None")

    def ids(name: str, unchanged: tuple[int, ...]) -> tuple[int, ...]:
        if returned[name] == texts[name]:
            return unchanged
        return tuple(tokenizer.encode(returned[name], add_special_tokens=False))

    return replace(
        record,
        prompt_token_ids=ids("prompt", record.prompt_token_ids),
        token_ids=ids("answer", record.token_ids),
        tenant=returned.get("tenant"),
        category=returned.get("category"),
    )


def _wrong(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"capture_redact={name!r} cannot be used ({reason}). Write it like mymodule:redact; the module "
        "importable where the server runs.",
        param="capture_redact",
    )


Outcome = Literal["kept", "redacted", "failed", "too_large", "full"]


@dataclass(frozen=True, slots=True)
class WriterSettings:
    folder: str
    max_bytes: int
    redact: str | None = None  # `module:function` (`load_hook`); None stores completions unchanged
    tokenizer: str | None = None  # folder of the tokenizer, for the hook

    def argument(self) -> str:
        return json.dumps(asdict(self))


class Writer:
    def __init__(self, settings: WriterSettings) -> None:
        self._ring = SegmentRing(Path(settings.folder), settings.max_bytes)
        self._redact: Callable[[CapturedRecord], CapturedRecord | None] | None = None
        if settings.redact is not None:
            assert settings.tokenizer is not None, "writer_settings() names the tokenizer of a hook"
            hook, tokenizer = load_hook(settings.redact), Tokenizer.load(Path(settings.tokenizer))
            self._redact = partial(redacted, hook=hook, tokenizer=tokenizer)

    def take(self, line: bytes) -> tuple[Outcome, str]:
        try:
            if self._redact is not None:
                record = self._redact(parse_line(line))
                if record is None:
                    return "redacted", ""
                line = record.line()
            if len(line) > self._ring.segment_bytes:
                return (
                    "too_large",
                    f"{len(line)} bytes; a completion may have at most {self._ring.segment_bytes}",
                )
            return ("kept", "") if self._ring.append(line) else ("full", "other servers write all segments")
        except RedactionError as error:
            return "failed", f"capture_redact failed: {error.message}"
        except OSError as error:
            return "full", f"the folder cannot be written: {error.strerror}"

    def close(self) -> None:
        self._ring.close()


def run(writer: Writer, lines: Iterable[bytes], reply: Callable[[str], None]) -> None:
    explained: set[Outcome] = set()
    for line in lines:
        outcome, reason = writer.take(line)
        reply(f"{outcome} {reason}" if reason and outcome not in explained else outcome)
        if reason:
            explained.add(outcome)
    writer.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the server ends, which closes our input
    os.nice(19)
    out = sys.stdout
    sys.stdout = sys.stderr  # keep a hook's prints out of the replies

    def reply(text: str) -> None:
        out.write(f"{text}\n")
        out.flush()

    try:
        writer = Writer(WriterSettings(**json.loads(sys.argv[1])))
    except MantaError as error:
        reply(f"refused {error.message}")
        raise SystemExit(2) from None
    reply("ready")
    run(writer, sys.stdin.buffer, reply)


NUM_SEGMENTS = 16
_LOCK = ".lock"


class SegmentRing:
    """The segments of one folder, including the one that this process writes.

    `max_bytes` limits all segments together. Raises ConfigError if other users may read the folder, or it
    cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.segment_bytes = max_bytes // NUM_SEGMENTS
        self._folder = folder
        self._handle: int | None = None
        self._size = 0
        _make_private(folder)

    def append(self, line: bytes) -> bool:
        """Write a whole line; False if others write all segments. Raises OSError, undoing a partial write."""
        assert len(line) <= self.segment_bytes, "callers check the size"
        if not (self._has_room(line) or self._open_segment(line)):
            return False
        assert self._handle is not None
        try:
            written = 0
            while written < len(line):
                written += os.write(self._handle, line[written:])
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += len(line)
        return True

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _has_room(self, line: bytes) -> bool:
        return self._handle is not None and self._size + len(line) <= self.segment_bytes

    def _open_segment(self, line: bytes) -> bool:
        is_start = self._handle is None
        self.close()
        with self._locked():
            paths = segments(self._folder)
            if is_start and self._continue_newest(paths) and self._has_room(line):
                return True
            self.close()
            for path in paths[:]:
                if len(paths) < NUM_SEGMENTS:
                    break
                if (handle := _lock_unless_used(path)) is not None:
                    path.unlink()
                    os.close(handle)
                    paths.remove(path)
            if len(paths) >= NUM_SEGMENTS:
                return False
            last = segment_number(paths[-1]) if paths else None
            path = segment_path(self._folder, (last or 0) + 1)
            self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = 0
        return True

    def _continue_newest(self, paths: list[Path]) -> bool:
        """Open the newest segment that no process writes, and drop a last line without a newline."""
        for path in reversed(paths):
            if (handle := _lock_unless_used(path)) is not None:
                self._handle = handle
                self._size = path.read_bytes().rfind(b"\n") + 1
                os.ftruncate(handle, self._size)
                return True
        return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Allow one process at a time to add or remove segments."""
        handle = open_own(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _lock_unless_used(path: Path) -> int | None:
    """Open and lock a segment; None if another process writes it."""
    try:
        handle = open_own(path, os.O_RDWR | os.O_APPEND)
    except OSError:  # a symbolic link, which may lead to another user's file
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode & 0o777
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(
            f"capture: {folder} cannot be created ({error.strerror}). Choose another folder with --capture.",
            param="capture",
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"capture: other users may read {folder} (mode {mode:o}), but captured traffic is "
            f"private. Use chmod 700 {folder}, or choose a folder that does not exist yet.",
            param="capture",
        )
    if not usable:
        raise ConfigError(
            f"capture: {folder} cannot be written. Choose another folder with --capture.", param="capture"
        )


if __name__ == "__main__":
    main()

"""Applies the operator's hook to a completion before it is stored.

    def redact(record):                        # --capture-redact mycompany.privacy:redact
        if record["tenant"] == "acme":
            return None                        # not stored
        record["prompt"] = EMAIL.sub("<email>", record["prompt"])
        return record

The hook gets `prompt` and `answer` as text with special tokens, and `model`, `day`, `tenant`, `category`.
Text that it changes is tokenized again, so removed tokens are never written to disk. If the hook fails, the
completion is not stored.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from ...cluster.errors import ConfigError, MantaError
from ..tokenization.tokenizer import Tokenizer
from .records import CapturedRecord

# Any: the return value of the operator's code.
Hook: TypeAlias = Callable[[dict[str, Any]], Any]


class RedactionError(MantaError):
    """The hook failed or returned something that is not a record. Quotes nothing of the record."""


def load_hook(name: str) -> Hook:
    """Import the function `module:function`. Raises ConfigError."""
    module, _, function = name.partition(":")
    try:
        hook = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing a module may raise anything
        raise _wrong(name, f"{type(error).__name__}: {error}") from None
    if not callable(hook):
        raise _wrong(name, "it is not a function")
    return hook


def redacted(record: CapturedRecord, hook: Hook, tokenizer: Tokenizer) -> CapturedRecord | None:
    """Return the record as the hook leaves it, or None if it must not be stored. Raises RedactionError."""
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

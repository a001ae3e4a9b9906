"""Messages of a chat made from other APIs' bodies, and tool outputs as text.

A client does not control what its tools return, so parts of every type are accepted: search results and
documents are converted to text, images and files to a placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....cluster.errors import RequestError
from ...tokenization.client_messages import text_parts
from ..wire.json_io import JsonObject

MAX_KIND_CHARS = 60
_TEXTS = ("text", "input_text", "output_text")
_KINDS = {"image_url": "image", "input_image": "image", "input_file": "file", "input_audio": "audio"}


@dataclass(slots=True)
class TranslatedMessages:
    messages: list[JsonObject] = field(default_factory=list[JsonObject])
    # `messages.3` of the chat -> the item of the body that it began with, for errors
    names: dict[str, str] = field(default_factory=dict[str, str])
    # types of skipped items, as X-Ignored-Params names them
    skipped: list[str] = field(default_factory=list[str])
    # dotted names of unknown fields in items
    unknown: list[str] = field(default_factory=list[str])
    is_open: bool = False  # whether the last message is the beginning of the answer

    def add(self, message: JsonObject, name: str) -> None:
        self.names[f"messages.{len(self.messages)}"] = name
        self.messages.append(message)

    def skip(self, name: str) -> None:
        if name not in self.skipped:
            self.skipped.append(name)

    def note_unknown(self, name: str) -> None:
        if name not in self.unknown:
            self.unknown.append(name)


def required_text(part: Mapping[str, Any], name: str, at: str) -> str:  # Any: JSON.
    """Raises RequestError, which names the path `at`, if the field is not a string."""
    value = part.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{at}.{name} must be a string.", param=f"{at}.{name}")
    return value


def content_of(texts: Sequence[str]) -> str | list[JsonObject]:
    """Return a message's content: its text, or text parts if it has several."""
    if len(texts) < 2:
        return "".join(texts)
    return [part for text in texts for part in text_parts(text)]


# Any: JSON.
def output_text(content: Any, at: str) -> str:
    """Join text parts by newlines. Raises RequestError."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{at} must be a string or a list of parts.", param=at)
    return "\n".join(_part_text(part, f"{at}.{i}") for i, part in enumerate(content))


def readable_text(part: Mapping[str, Any]) -> str | None:
    if part.get("type") == "search_result":
        return _lines(part.get("title"), part.get("source"), _plain(part.get("content")))
    if part.get("type") == "document" and (text := _document(part.get("source"))) is not None:
        return _lines(part.get("title"), part.get("context"), text)
    return None


def _part_text(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f"{at}: a part of a tool's output must be an object with a type.", param=at)
    if kind in _TEXTS or kind == "tool_reference":
        name = "tool_name" if kind == "tool_reference" else "text"
        return required_text(part, name, at)
    found = readable_text(part)
    return _placeholder(kind, part) if found is None else found


def _placeholder(kind: str, part: Mapping[str, Any]) -> str:
    name = part.get("title") or part.get("filename")
    named = f" {name}" if isinstance(name, str) else ""
    return f"[{_KINDS.get(kind, kind)[:MAX_KIND_CHARS]}{named}: left out, this model reads text only]"


def _document(source: Any) -> str | None:
    """Return None for a file, a URL or the bytes of a PDF."""
    if not isinstance(source, Mapping):
        return None
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return source["data"]
    return _plain(source.get("content")) if source.get("type") == "content" else None


def _plain(content: Any) -> str:
    """Join the texts of nested blocks, with placeholders for other types."""
    if isinstance(content, str):
        return content
    blocks = [block for block in content or () if isinstance(block, Mapping)]
    texts = (block.get("text") or _placeholder(str(block.get("type")), block) for block in blocks)
    return "\n".join(text for text in texts if isinstance(text, str))


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if text and isinstance(text, str))

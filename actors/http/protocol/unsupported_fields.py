"""Request fields that are not implemented: which are refused, which are ignored, which are unknown.

A field that would change the answer is refused if it is set to anything but its default, because an answer
that ignores it would be silently wrong. An implemented field moves from `REFUSED` to a model of
`protocol.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ....cluster.errors import RequestError, brief_name, did_you_mean
from ....cluster.request.structured_outputs import CONSTRAINTS
from ..config.settings import UnknownParams

# Field -> values that mean "not used"; None and absence always do.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "repetition_detection": (),
    "stream_interval": (1,),
    "prompt_embeds": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "lora_path": (),
}
# Field -> the value that means "not used", and what to do instead of using it.
NEVER: Mapping[str, tuple[object, str]] = {
    "best_of": (1, "Leave it out: ask for n completions with logprobs, and choose among them."),
    "suffix": (
        "",
        "Leave it out: put what is to follow into the prompt, as the model was taught.",
    ),
    **{
        f"guided_{constraint}": (None, f"Send structured_outputs.{constraint}.") for constraint in CONSTRAINTS
    },
    "guided_decoding_backend": (None, "Leave it out: there is one."),
    "guided_whitespace_pattern": (None, "Leave it out, or send structured_outputs.disable_any_whitespace."),
    "regex": (None, "Send structured_outputs.regex."),
    "ebnf": (None, "Send structured_outputs.grammar."),
}
# Fields that describe the request and do not affect the answer.
SILENT = frozenset({"user", "metadata", "session_id", "safety_identifier", "service_tier"})


def check_extra_fields(extra: Mapping[str, Any], known: Iterable[str], policy: UnknownParams) -> list[str]:
    """Return unknown, ignored fields. Raises RequestError for those that must not be ignored."""
    for name, value in extra.items():
        if name in NEVER and value is not None and value != NEVER[name][0]:
            raise RequestError(f"{name} is not supported. {NEVER[name][1]}", param=name)
        if name in REFUSED and value is not None and value not in REFUSED[name]:
            raise RequestError(
                f"{name} is not supported by this server yet. Leave it out"
                + (f" or send its default ({json.dumps(REFUSED[name][0])})." if REFUSED[name] else "."),
                param=name,
            )
    unknown = [name for name in extra if not (name in REFUSED or name in NEVER or name in SILENT)]
    if unknown and policy == "reject":
        hint = did_you_mean(unknown[0], [*known, *REFUSED, *NEVER, *SILENT], fallback="Leave it out.")
        name = brief_name(unknown[0])
        raise RequestError(f"{name} is not a known field. {hint}", param=name)
    return unknown

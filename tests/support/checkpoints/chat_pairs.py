"""Chat templates with tools and reasoning, in the style of two families, for tiny random pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manta.cluster.config import EngineConfig

from support.checkpoints.text_pair import make_text_pair

# Marks as ordinary text, as in Qwen3's vocabulary.
HERMES = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}"
    "{{ (tool if whole_tools else tool.function.name) | tojson }}\n{% endfor %}"
    "call: <tool_call>{...}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Marks as special tokens.
_MARKS = ("start", "channel", "message", "end", "call", "return", "constrain")
HARMONY_TOKENS = tuple(f"<|{mark}|>" for mark in _MARKS)
HARMONY = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "num_pages": 256, "num_threads": 1}


def chat_config(
    folder: Path, template: str, special_tokens: tuple[str, ...] = (), **more: Any
) -> EngineConfig:
    target, drafter = make_text_pair(folder, special_tokens=special_tokens, template=template)
    speculation = {"model": str(drafter), "adaptive": False}
    return EngineConfig.from_dict(
        {"model": str(target), "speculative_config": speculation, **SETTINGS, **more}
    )


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool(
    "get_weather", city={"enum": ["Paris", "Rome"]}, days={"type": "integer", "minimum": 1, "maximum": 9}
)
NOW = tool("now")
TOOLS = [WEATHER, NOW]
ARGUMENTS = json.dumps({"city": "Paris", "days": 3})
SAID = (
    "<think>\nThe user wants weather.\n</think>\n\nI look.\n"
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def saying(*texts: str) -> dict[str, Any]:
    """Return fields that force one of these texts as the whole answer, with its reasoning and calls."""
    elements = [{"type": "const_string", "value": text} for text in texts]
    return {"structured_outputs": {"structural_tag": {"format": {"type": "or", "elements": elements}}}}

"""Chat templates with the role rules of published ones, shortened; `data/role_templates` has their texts.

By kind: which roles are refused, which are left out silently, and where.
"""

from __future__ import annotations

from support.paths import DATA

# qwen3: a later system message is a turn; a developer's is left out.
# qwen35: one system message, first; no developer; somewhere a user.
# gemma2: no system message; turns alternate.
# gemma3: a system message begins the first user's; turns alternate.
# mistral: one system message, first; turns without calls and what they returned alternate.
# llama3: any role, by its name.
# gpt_oss: instructions of a developer or the system, first; later ones are left out.
KINDS = ("qwen3", "qwen35", "gemma2", "gemma3", "mistral", "llama3", "gpt_oss")
ROLE_TEMPLATES = {
    kind: (DATA / "role_templates" / f"{kind}.jinja").read_text().removesuffix("\n") for kind in KINDS
}
NO_TOOLS = ("gemma2", "gemma3")

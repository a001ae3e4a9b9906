"""The live page `/ui`: one HTML file with its styles and script, and its routes.

The page uses this server's API like any other client (`page.html` lists the routes). It contains no data, so
it needs no key; it asks for the key, keeps it until its tab is closed, and sends it with each request.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from ....cluster.config import SpeculativeConfig

PATH = "/ui"
_BODY, _PROMPT, _ABOUT = b"<body>", b"<!-- the first prompt -->", b"<!-- about speculation -->"
USUAL_PROMPT = "Write a Python function that checks whether a number is prime."
# Nothing is loaded from, sent to or framed by other origins; model output is shown as text, never as HTML.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def ui_routes(
    *,
    batches: bool,
    prompt: Callable[[], str | None] = lambda: None,
    speculative_config: SpeculativeConfig | None = None,
    advice: str = "",
) -> APIRouter:
    """Return the routes.

    Args:
        batches: whether the server has batches for the page to show.
        prompt: called for the first visitor: the prompt with which the page opens, None for the usual one.
        speculative_config: of the engine; without one the page shows `advice` and no second column.
        advice: what to do for speculation.
    """
    router = APIRouter(include_in_schema=False)
    drafts, about = "none", advice
    if speculative_config is not None:
        drafts = "copies" if speculative_config.method in _COPYING else "passes"
        about = describe_speculation(speculative_config)
    body = f'<body data-drafts="{drafts}"{" data-batches" if batches else ""}>'

    @cache
    def page() -> bytes:
        content = files(__name__).joinpath("page.html").read_bytes()
        content = content.replace(_BODY, body.encode()).replace(_ABOUT, html.escape(about).encode())
        return content.replace(_PROMPT, html.escape(prompt() or USUAL_PROMPT).encode())

    @router.get("/")
    async def root() -> Response:
        return RedirectResponse(PATH.lstrip("/"))  # relative: a proxy may add a path prefix

    @router.get(PATH)
    async def ui() -> Response:
        return Response(page(), media_type="text/html; charset=utf-8", headers=_HEADERS)

    return router


_COPYING = frozenset({"suffix", "ngram"})


def describe_speculation(config: SpeculativeConfig) -> str:
    """Return where drafts come from and when there are some, for readers who know neither."""
    texts = "the prompt or the answer"
    if config.suffix_decoding_max_cached_requests:
        texts = "the prompt, the answer or earlier answers"
    copied = f"the tokens that followed the same words in {texts}"
    if config.method in _COPYING:
        proposed, when = f"A step proposes {copied}", "wherever words repeat"
    else:
        drafter = "A small drafter" if config.has_model else "An additional layer of the model"
        proposed = f"{drafter} proposes several tokens"
        when = "in every step"
        if config.suffix_drafts:
            proposed += f" or {copied}"
    checked = "one step of the model checks them all: the answer is the same in fewer steps"
    return (
        f"{proposed}, and {checked}. Here it drafts {when}, also where this machine would be faster without."
    )

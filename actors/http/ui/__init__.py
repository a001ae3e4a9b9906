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

PATH = "/ui"
_NO_BATCHES = b"<body data-batches>", b"<body>"
_PROMPT, _ADVICE = b"<!-- the first prompt -->", b"<!-- the advice -->"
USUAL_PROMPT = "Explain in three sentences why the sky is blue."
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
    *, batches: bool, prompt: Callable[[], str | None] = lambda: None, advice: str = ""
) -> APIRouter:
    """Return the routes.

    Args:
        batches: whether the server has batches for the page to show.
        prompt: called for the first visitor: the prompt with which the page opens, None for the usual one.
        advice: shown instead of a second column by a server without speculation; "" for one with it.
    """
    router = APIRouter(include_in_schema=False)

    @cache
    def page() -> bytes:
        content = files(__name__).joinpath("page.html").read_bytes()
        content = content.replace(_ADVICE, html.escape(advice).encode())
        content = content.replace(_PROMPT, html.escape(prompt() or USUAL_PROMPT).encode())
        return content if batches else content.replace(*_NO_BATCHES)

    @router.get("/")
    async def root() -> Response:
        return RedirectResponse(PATH.lstrip("/"))  # relative: a proxy may add a path prefix

    @router.get(PATH)
    async def ui() -> Response:
        return Response(page(), media_type="text/html; charset=utf-8", headers=_HEADERS)

    return router

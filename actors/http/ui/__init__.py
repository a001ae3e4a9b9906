"""The live page `/ui`: one file of HTML with its styles and its script, and the routes that lead to it.

It asks this server's own API as any client does (`page.html` says which routes): nothing is told to it that
is not told to others. The page itself holds nothing of anybody, so it is open where keys are asked for; it
asks for the key, keeps it until its tab is closed, and sends it with each request.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

PATH = "/ui"
_NO_BATCHES = b"<body data-batches>", b"<body>"
# Nothing from elsewhere is loaded, asked or framed; what a model writes is text, never HTML.
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


def ui_routes(*, batches: bool) -> APIRouter:
    """The routes of the page.

    Args:
        batches: whether the server has any, so that the page asks for them.
    """
    router = APIRouter(include_in_schema=False)
    page = files(__name__).joinpath("page.html").read_bytes()
    if not batches:
        page = page.replace(*_NO_BATCHES)

    @router.get("/")
    async def root() -> Response:
        return RedirectResponse(PATH.lstrip("/"))  # relative: a proxy may have a path before it

    @router.get(PATH)
    async def ui() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=_HEADERS)

    return router

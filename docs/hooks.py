"""Adds pages to the site besides the files of this folder; mkdocs calls the functions by their names.

* The reference: pages that `reference_pages/` makes of the parsers, settings, metrics, routes and
  docstrings.
* Sources: files outside this folder that pages link to, so that such links work as they do in a clone.
* A list of the decisions, at `decisions/`.
* Search: only pages of the navigation are found, guides first; decisions and sources are reached by links.
* Pages for developers, which the site excludes, are named where a page of the repository links to them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from manta.docs.reference_pages.commands import commands_page
from manta.docs.reference_pages.http_routes import routes_page
from manta.docs.reference_pages.metrics import metrics_page
from manta.docs.reference_pages.python_api import python_page
from manta.docs.reference_pages.settings import settings_page, vllm_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
REFERENCE = {
    "reference/commands.md": commands_page,
    "reference/settings.md": settings_page,
    "reference/vllm.md": vllm_page,
    "reference/routes.md": routes_page,
    "reference/metrics.md": metrics_page,
    "reference/python.md": python_page,
}
DECISIONS = "decisions/index.md"
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
PAGE_LINK = re.compile(r"\[([^\[\]]+)\]\(([\w./-]+\.md)(?:#[^)]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def listed_pages(nav: Any) -> list[str]:
    """Return the paths of the pages that a navigation lists, in its order."""
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in listed_pages(each)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {name: page() for name, page in REFERENCE.items()} | {DECISIONS: _decisions_page()}
    linked = {source for file in files.documentation_pages() for source in _sources(file)}
    for name, content in (pages | {f"{path}.md": _source_page(path) for path in linked}).items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri not in listed_pages(config.nav):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith("how-to/"):
        page.meta["search"] = {"boost": 2}
    here = posixpath.dirname(page.file.src_uri)

    def to_excluded(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[2]))
        file = files.get_file_from_path(path)
        return link[0] if file is None or not file.inclusion.is_excluded() else f"{link[1]} (`docs/{path}`)"

    def to_page(link: re.Match[str]) -> str:
        source = _source(link[1], here)
        return link[1] if source is None else f"{posixpath.relpath(source, here or '.')}.md"

    markdown = PAGE_LINK.sub(to_excluded, markdown.replace("](decisions/)", f"]({DECISIONS})"))
    return LINK.sub(to_page, markdown)


def _sources(file: File) -> set[str]:
    """The pages of the sources that a page links to."""
    here = posixpath.dirname(file.src_uri)
    found = (_source(link, here) for link in LINK.findall(file.content_string))
    return {source for source in found if source is not None}


def _source(link: str, here: str) -> str | None:
    """Return the page of a source that a link leads to; None if it stays here or leads to no file."""
    path = posixpath.normpath(posixpath.join(here, link))
    outside = path.removeprefix("../")
    is_source = path.startswith("../") and not outside.startswith("../") and (DOCS.parent / outside).is_file()
    return f"source/{outside}" if is_source else None


def _decisions_page() -> str:
    found = sorted(
        (path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "), path.name)
        for path in (DOCS / "decisions").glob("*.md")
    )
    return "\n".join(["# Decisions", "", *(f"* [{title}]({name})" for title, name in found), ""])


def _source_page(path: str) -> str:
    name = path.removeprefix("source/")
    text = (DOCS.parent / name).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(name).suffix, "text")
    return f"# `{name}`\n\n~~~~~~ {language}\n{text}\n~~~~~~\n"

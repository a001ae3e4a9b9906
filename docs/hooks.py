"""Adds pages to the site besides the files of this folder; mkdocs calls the functions by their names.

* The reference: pages that `reference_pages/` makes of the parsers, settings, metrics, routes and
  docstrings.
* Sources: files outside this folder that pages link to, so that such links work as they do in a clone.
* Decisions: all of `decisions/` are in the navigation, without being listed by hand.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from manta.docs.reference_pages.commands import commands_page
from manta.docs.reference_pages.http_routes import routes_page
from manta.docs.reference_pages.metrics import metrics_page
from manta.docs.reference_pages.python_api import python_page
from manta.docs.reference_pages.settings import settings_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
REFERENCE = {
    "reference/commands.md": commands_page,
    "reference/settings.md": settings_page,
    "reference/routes.md": routes_page,
    "reference/metrics.md": metrics_page,
    "reference/python.md": python_page,
}
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    decisions = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / "decisions").glob("*.md"))
    config.nav = [*(config.nav or []), {"Decisions": decisions}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {name: page() for name, page in REFERENCE.items()}
    linked = {source for file in files.documentation_pages() for source in _sources(file)}
    for name, content in (pages | {f"{path}.md": _source_page(path) for path in linked}).items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = posixpath.dirname(page.file.src_uri)

    def to_page(link: re.Match[str]) -> str:
        source = _source(link[1], here)
        return link[1] if source is None else f"{posixpath.relpath(source, here or '.')}.md"

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


def _source_page(path: str) -> str:
    name = path.removeprefix("source/")
    text = (DOCS.parent / name).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(name).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# `{name}`\n\n~~~~~~ {language}\n{text}\n~~~~~~\n"

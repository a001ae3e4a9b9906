"""The navigation stays short, each of its pages is two clicks away, and repeated figures agree."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

import yaml
from manta.docs.hooks import REFERENCE, listed_pages
from support.paths import ROOT

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
NAVIGATION: list[str] = listed_pages(yaml.safe_load(CONFIG)["nav"])
MOST_WORDS = 43_000


def markdown(page: str) -> str:
    return REFERENCE[page]() if page in REFERENCE else (DOCS / page).read_text(encoding="utf-8")


def links(page: str) -> Iterator[str]:
    """Yield the pages of docs/ that a page links to."""
    for link in re.findall(r"\]\(([^)#\s]+\.md)", markdown(page)):
        if "//" not in link:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def test_the_pages_of_the_navigation_have_few_words() -> None:
    words = {page: len(re.findall(r"\S*\w\S*", markdown(page))) for page in NAVIGATION}
    assert sum(words.values()) <= MOST_WORDS, words


def test_every_page_of_the_navigation_is_two_clicks_from_the_index() -> None:
    assert NAVIGATION[0] == "index.md" and len(set(NAVIGATION)) == len(NAVIGATION)
    first = set(links("index.md"))
    second = {link for page in first & set(NAVIGATION) for link in links(page)}
    assert [page for page in NAVIGATION[1:] if page not in first | second] == []

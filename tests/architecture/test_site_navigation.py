"""The navigation stays short, each of its pages is two clicks away, and repeated figures agree."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from manta.docs.hooks import REFERENCE, listed_pages
from support.paths import ROOT

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
NAVIGATION: list[str] = listed_pages(yaml.safe_load(CONFIG)["nav"])
MOST_WORDS = 35_000


def markdown(page: str) -> str:
    return REFERENCE[page]() if page in REFERENCE else (DOCS / page).read_text(encoding="utf-8")


def links(page: str) -> Iterator[str]:
    """Yield the pages of docs/ that a page links to."""
    for link in re.findall(r"\]\(([^)#\s]+\.md)", markdown(page)):
        if "//" not in link:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def test_the_pages_of_the_navigation_have_at_most_35000_words() -> None:
    words = {page: len(re.findall(r"\S*\w\S*", markdown(page))) for page in NAVIGATION}
    assert sum(words.values()) <= MOST_WORDS, words


def test_every_page_of_the_navigation_is_two_clicks_from_the_index() -> None:
    assert NAVIGATION[0] == "index.md" and len(set(NAVIGATION)) == len(NAVIGATION)
    first = set(links("index.md"))
    second = {link for page in first & set(NAVIGATION) for link in links(page)}
    assert [page for page in NAVIGATION[1:] if page not in first | second] == []


PAIR = "benchmarks/shipped-pair-cpu.json"
# What a figure says, its value in a benchmark's file (file, keys) or None, and where pages repeat it.
FIGURES: list[tuple[str, tuple[Any, ...] | None, dict[str, str]]] = [
    (
        "the shipped pair beside plain decoding, one request",
        (PAIR, "points", 0, "speedup"),
        {
            "README.md": r"([\d.]+)\N{MULTIPLICATION SIGN} at 1 request",
            "docs/faq.md": r"decodes ([\d.]+) times as fast as plain decoding at one",
            "docs/results.md": r"shipped pair, T = 0 [^|]*\| ([\d.]+) \|",
        },
    ),
    (
        "the shipped pair beside plain decoding, eight requests",
        (PAIR, "points", 1, "speedup"),
        {
            "README.md": r"([\d.]+)\N{MULTIPLICATION SIGN} at 8, outputs",
            "docs/faq.md": r"and ([\d.]+) times at eight, at temperature 0",
            "docs/results.md": r"shipped pair, T = 0 [^|]*\| [\d.]+ \| ([\d.]+)",
        },
    ),
    (
        "a long comparison at temperature 0, one request",
        ("benchmarks/sweep-cpu.json", "points", 0, "sides", "adaptive", "ratio_to_plain"),
        {
            "docs/faq.md": r"in a longer comparison ([\d.]+)",
            "docs/results.md": r"changing lengths [^|]*\| ([\d.]+)",
        },
    ),
    (
        "a long comparison, the best point",
        ("benchmarks/sweep-cpu.json", "points", 1, "sides", "adaptive", "ratio_to_plain"),
        {
            "docs/faq.md": r"0\.99 to ([\d.]+) times as fast",
            "docs/roadmap.md": r"0\.99 to ([\d.]+)\)",
            "docs/results.md": r"0\.99 to ([\d.]+) times at each",
            "docs/benchmarks/README.md": r"0\.99 to ([\d.]+) times as fast as plain decoding",
        },
    ),
    (
        "the loss at temperature 1 on an EPYC, percent",
        None,
        {
            "README.md": r"lost up to (\d+) % at temperature 1",
            "docs/faq.md": r"lost up to (\d+) % on an EPYC at temperature 1",
            "docs/results.md": r"lost up to (\d+) % at temperature 1",
        },
    ),
    (
        "one stream at temperature 1 beside llama.cpp on a Zen 4",
        None,
        {
            "README.md": r"returned ([\d.]+) of llama\.cpp's tokens",
            "docs/faq.md": r"had ([\d.]+) of llama\.cpp's tokens",
            "docs/results.md": r"T = 1: \*\*([\d.]+)\*\*, 1\.29",
            "docs/benchmarks/README.md": r"at T = 0, and ([\d.]+), 1\.29 and 1\.16",
        },
    ),
    (
        "audited tokens",
        ("benchmarks/audit-cpu.json", "tokens"),
        {
            "README.md": r"none of ([\d,]+) tokens changed",
            "docs/results.md": r"0 of ([\d,]+), in 720 requests",
        },
    ),
    (
        "greedy tokens compared with transformers'",
        None,
        {
            "README.md": r"0 of ([\d,]+) greedy tokens differ",
            "docs/results.md": r"differ from transformers' [^|]*\| 0 of ([\d,]+)",
        },
    ),
    (
        "acceptance of the shipped drafter, greedy",
        None,
        {
            "README.md": r"of ([\d.]+) at temperature 0 and",
            "docs/results.md": r"240 held-out prompts [^|]*\| ([\d.]+);",
            "docs/how-to/your-own-model.md": r"88 minutes[^|]*\| ([\d.]+) \(",
            "models/drafter/README.md": r"\| overall \| 240 \| ([\d.]+)",
        },
    ),
]


@pytest.mark.parametrize(("what", "measured", "places"), FIGURES, ids=[figure[0] for figure in FIGURES])
def test_a_figure_is_the_same_wherever_it_stands(
    what: str, measured: tuple[Any, ...] | None, places: dict[str, str]
) -> None:
    found: dict[str, str] = {}
    for name, pattern in places.items():
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        hit = re.search(pattern, text)
        assert hit is not None, f"{name} no longer says {what}: change the pattern or remove it"
        found[name] = hit[1]
    if measured is not None:
        value = json.loads((DOCS / measured[0]).read_text(encoding="utf-8"))
        for key in measured[1:]:
            value = value[key]
        found[measured[0]] = f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
    assert len(set(found.values())) == 1, found

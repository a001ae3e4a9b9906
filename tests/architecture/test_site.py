"""The site builds strictly and offline; the reference is complete; the README's figures are the files'."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cli import app as benchmarks
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.metrics.engine_metrics import CATALOGUE
from manta.cluster.metrics.fleet_metrics import BATCH_CATALOGUE, GATEWAY_CATALOGUE, SCALING_CATALOGUE
from manta.docs.reference_pages.commands import commands, commands_page
from manta.docs.reference_pages.http_routes import routes_page
from manta.docs.reference_pages.metrics import metrics_page
from manta.docs.reference_pages.python_api import python_page
from manta.docs.reference_pages.settings import settings_page
from manta.jobs.cli import app
from support.jobs.package_copy import run_python
from support.paths import ROOT
from typer.main import get_command

# mkdocs as `make docs` runs it, in a process that ends at any name look-up or connection.
BUILD = """
import sys

def hook(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"the build asks a network: {arguments}")

sys.addaudithook(hook)
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--site-dir", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    run_python(BUILD, folder, NO_MKDOCS_2_WARNING="1")
    return folder


class Loads(HTMLParser):
    """The URLs that a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        wanted = given.get("src") or (given.get("href") if tag == "link" else None)
        if wanted and given.get("rel") not in ("prev", "next"):
            self.found.append(wanted)


def test_no_page_of_the_site_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert loads.found, page
        assert [each for each in loads.found if "//" in each] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), (
            style
        )
    assert len(pages) > 60


OFF_SITE = {"benchmarks/first-ten-minutes.md", "measurements.md", "operations-deaths.md", "testing.md"}


def test_every_guide_picture_and_decision_is_on_the_site(site: Path) -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        inner = path.relative_to(ROOT / "docs")
        page = inner.with_name("index.html") if inner.name == "README.md" else inner.with_suffix(".html")
        assert (site / page).is_file() == (str(inner) not in OFF_SITE), path
    results = (site / "results.html").read_text(encoding="utf-8")
    assert "measurements (<code>docs/measurements.md</code>)" in results, "named instead of linked"
    assert "<svg" in (site / "method-noise.svg").read_text(encoding="utf-8")


def test_links_out_of_the_guides_lead_to_the_sources_as_pages(site: Path) -> None:
    families = (site / "families.html").read_text(encoding="utf-8")
    assert 'href="source/actors/targets/families/llama.py.html"' in families
    page = (site / "source/actors/targets/families/llama.py.html").read_text(encoding="utf-8")
    assert "ModelSpec" in page


def test_the_reference_names_every_setting_metric_and_command() -> None:
    settings, metrics, commands = settings_page(), metrics_page(), commands_page()
    for kind, prefix in (
        (EngineConfig, ""),
        (ServerSettings, ""),
        (SpeculativeConfig, "speculative_config."),
    ):
        for field in fields(kind):
            assert f"| `{prefix}{field.name}` |" in settings
    assert "| `max_num_seqs` | `--max-num-seqs` | integer | `64` |" in settings
    for metric in (*CATALOGUE, *GATEWAY_CATALOGUE, *SCALING_CATALOGUE, *BATCH_CATALOGUE):
        assert f"| `{metric.name}` | {metric.kind} | {metric.unit} |" in metrics
    for name in ("serve", "batch", "bench sweep", "dashboards push", "simulate node", "drafter train"):
        assert f"## `manta {name}`" in commands
    assert commands.count("`--max-num-seqs") <= 3, "shared flags stand once, not with each command"


def test_the_reference_names_every_route_and_what_users_import() -> None:
    routes, python = routes_page(), python_page()
    for route in (
        "POST /v1/chat/completions",
        "POST /v1/messages",
        "GET /v1/batches/{batch_id}",
        "GET /health",
    ):
        assert f"| `{route}` |" in routes
    assert "| `temperature` | number |  | 0 is greedy" in routes, "told where it is declared"
    for name in ("manta.LLM", "LLM.generate", "manta.SamplingParams", "manta.data.build_processor"):
        assert f"`{name}`\n" in python


@pytest.mark.parametrize("page", [settings_page, metrics_page, commands_page, routes_page])
def test_the_reference_describes_everything_it_names(page: Any) -> None:
    """A new setting, flag, metric, route or field needs a docstring or help text."""
    columns = {settings_page: -1, metrics_page: 3, commands_page: -1, routes_page: -1}[page]
    rows = [line.strip("|\n").split(" | ") for line in page().splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows if not row[columns].strip(" |")] == []


def written_commands(text: str) -> list[list[str]]:
    """The commands in code blocks, as a shell splits them; words with a backtick are prose."""
    lines = text.replace("\\\n", " ").splitlines()
    pieces = [piece for line in lines for piece in re.split(r" (?:&&|\||&|--)(?: |$)", line)]
    calls = (
        re.fullmatch(r" *(?:[A-Z_]+=\S+ )*((?:manta|python tests/benchmarks) [^`]+)", piece)
        for piece in pieces
    )
    return [shlex.split(call[1], comments=True) for call in calls if call]


def test_the_parser_knows_every_command_of_the_guides() -> None:
    known = dict(commands("manta", get_command(app)))
    known |= dict(commands("python tests/benchmarks", get_command(benchmarks)))
    known["manta bench"] = known["manta bench speculation"]  # which runs where none is named
    guides = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    written = [words for path in guides for words in written_commands(path.read_text(encoding="utf-8"))]
    assert len(written) > 60
    for words in written:
        depth = max(n for n in range(1, len(words) + 1) if " ".join(words[:n]) in known)
        parameters = known[" ".join(words[:depth])].params
        flags = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts)} | {"--help"}
        requested = [word.partition("=")[0] for word in words[depth:] if re.match(r"--?[a-z]", word)]
        assert depth > 1 or requested, words
        assert [flag for flag in requested if flag not in flags] == [], words


def parsed(command: list[str]) -> dict[str, Any]:
    """Parse the parameters of a `manta` command without running it; click raises for wrong ones."""
    group: Any = get_command(app)
    return group.commands[command[1]].make_context(command[1], command[2:]).params


@pytest.mark.parametrize(
    ("guide", "minimum"), [("batch.md", 6), ("production.md", 8), ("how-to/structured-output.md", 1)]
)
def test_the_commands_of_a_guide_have_all_they_need(guide: str, minimum: int) -> None:
    text = (ROOT / "docs" / guide).read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    found = [words for words in written_commands(blocks) if words[0] == "manta"]
    assert len(found) >= minimum
    for words in found:
        parsed(words)
    with pytest.raises(Exception, match=r"--prompt-columm"):
        parsed(["manta", "batch", "-m", "x", "-i", "a", "-o", "b", "--prompt-columm", "c"])


TIMES = "\N{MULTIPLICATION SIGN}"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def benchmark(name: str) -> Any:
    return json.loads((ROOT / "docs/benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def test_every_file_that_the_readme_names_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert len(links) > 25 and [link for link in links if not (ROOT / link).exists()] == []


def test_the_readmes_figures_equal_the_files() -> None:
    one, eight = benchmark("compare-cpu")["points"]
    ours, rate = one["contenders"][0], eight["contenders"][0]
    reported = [f"{ours['tokens_per_s']:,.0f}", f"{rate['tokens_per_s']:,.0f}"]
    by_name = [{each["name"]: each["ratio"] for each in point["contenders"]} for point in (one, eight)]
    reported += [f"**{point['Hugging Face generate']:.1f}{TIMES}**" for point in by_name]
    reported += [f"{by_name[0]['unbatched DFlash loop']:.1f}{TIMES} a plain DFlash loop"]
    pair = {point["requests"]: point for point in benchmark("shipped-pair-cpu")["points"]}
    reported += [f"{pair[1]['speedup']:.2f}{TIMES} at 1 request", f"{pair[8]['speedup']:.2f}{TIMES} at 8"]
    audit = benchmark("audit-cpu")
    reported += [f"{audit['requests']} requests", f"{audit['tokens']:,} tokens"]
    assert audit["mismatches"] == 0 and all(all(each["identical"].values()) for each in pair.values())
    words = " ".join(README.split())
    assert [each for each in reported if each not in words] == []


def test_the_readmes_acceptance_equals_the_cards() -> None:
    card = (ROOT / "models/drafter/README.md").read_text(encoding="utf-8")
    overall = re.search(r"\| overall \| (\d+) \| ([\d.]+) \| ([\d.]+) \| \d+% \| ([\d.]+) \|", card)
    assert overall is not None
    prompts, greedy, fresh, drawn = overall.groups()
    words = " ".join(README.split())
    assert f"of {greedy} at temperature 0" in words and f"{drawn} at 1, on {prompts} held-out" in words
    assert (
        f"a step returns {float(fresh):.1f} tokens, and at temperature 1 it returns {float(drawn):.1f}"
        in words
    )


def test_every_decision_gives_context_decision_and_consequences_in_this_order() -> None:
    for path in (ROOT / "docs/decisions").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        parts = [text.find(part) for part in ("**Context.**", "**Decision", "**Consequences.**")]
        assert 0 < parts[0] < parts[1] < parts[2], path.name


# Files of other repositories that pages name.
FOREIGN = {"prepare_data.py", "tokenization_kimi.py"}


def test_the_modules_that_pages_name_exist() -> None:
    folders = ("actors", "cluster", "docs", "drafter", "jobs", "models", "tests")
    modules = [f"/{path.relative_to(ROOT)}" for each in folders for path in (ROOT / each).rglob("*.py")]
    modules += ["/data.py", "/version.py"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        named = re.findall(r"`(?:\.\.\./)?([\w/]+\.py)(?:::[^`]*)?`", page.read_text(encoding="utf-8"))
        unknown = {name for name in named if not any(module.endswith(f"/{name}") for module in modules)}
        assert unknown <= FOREIGN, page.name


def test_the_method_shows_accept_as_it_is() -> None:
    shown = re.search(
        r"```python\ndef accept\(.*?\n(.*?)```", (ROOT / "docs/method.md").read_text(), re.DOTALL
    )
    assert shown is not None
    source = (ROOT / "drafter/step/sampling/verification.py").read_text(encoding="utf-8")
    assert shown[1].rstrip() in source


def test_the_files_of_the_reading_order_have_about_the_lines_that_it_says() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| (\d+) \|", page, re.MULTILINE)
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name, _ in rows}
    assert len(rows) == 9
    assert {name: said for name, said in rows if not 0.85 < lines[name] / int(said) < 1.15} == {}

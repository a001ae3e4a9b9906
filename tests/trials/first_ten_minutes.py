"""Run a new user's first commands: those of README and tutorial, as written, in a fresh clone.

    python tests/trials first_ten_minutes docs/benchmarks/first-ten-minutes.md     (on an idle machine)

`make demo` makes the clone's environment. Every command runs on its own terminal; the table shows its
seconds, the longest time without output, and its last line. Commands that need a hub, a bucket
or a cluster are left out. Exit status 1: a command failed or was silent for more than five seconds.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from manta.jobs.bench.common.provenance import provenance
from support.paths import ROOT

FILES = ("README.md", "docs/tutorial.md")
MAX_SILENT_S = 5.0
TIMEOUT_S = 900.0
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"Qwen/|s3://|h200\.yaml|make (test|install)|^source ")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ANSWER_ID = re.compile(r'"id":"(chatcmpl-[^"]+)"')
CHAT = "Write a function that adds two numbers.\n\x04"


@dataclass
class Played:
    """A command on its terminal, and its output."""

    command: str
    process: subprocess.Popen[bytes]
    terminal: int
    log: TextIO
    begin_s: float = field(default_factory=time.monotonic)
    text: str = ""
    silent_s: float = 0.0
    seconds: float = 0.0
    _last_s: float = 0.0

    def read_until(self, word: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the command has printed this word, or has ended."""
        self._last_s = self._last_s or self.begin_s
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            ready = select.select([self.terminal], [], [], 0.1)[0]
            now_s = time.monotonic()
            self.silent_s = max(self.silent_s, now_s - self._last_s)
            if not ready:
                if self.process.poll() is not None:
                    break
                continue
            try:
                piece = os.read(self.terminal, 65536).decode("utf-8", "replace")
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            self._last_s = now_s
            self.text += ESCAPES.sub("", piece)
            self.log.write(ESCAPES.sub("", piece).replace("\r\n", "\n"))
            if word is not None and word in self.text:
                break
        self.seconds = time.monotonic() - self.begin_s

    def end(self, number: signal.Signals | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
            self.read_until(timeout_s=60.0)
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in re.split(r"[\r\n]+", self.text) if line.strip()]
        return lines[-1] if lines else ""


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a page's bash and Python blocks, each as one string of bash."""
    for kind, block in BLOCK.findall(text):
        if kind == "python":
            yield f"python - <<'END'\n{block}END"
            continue
        lines = ""
        for line in block.splitlines(keepends=True):
            lines += line
            whole = not lines.rstrip("\n").endswith("\\")
            if (
                whole
                and not subprocess.run(["bash", "-n"], input=lines, text=True, capture_output=True).stderr
            ):
                if lines.strip():
                    yield lines.strip()
                lines = ""


def is_server(command: str) -> bool:
    return command.startswith("manta serve")


def play(clone: Path, log: TextIO) -> list[tuple[str, float, float, int, str]]:
    """Rows of command, seconds, longest silence, exit status, last line."""
    environment = {**os.environ, "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}", "COLUMNS": "120"}
    environment.pop("PYTHONPATH", None)
    rows: list[tuple[str, float, float, int, str]] = []
    server: Played | None = None
    answer_id = ""

    def begin(command: str) -> Played:
        log.write(f"\n$ {command}\n")
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=clone,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        return Played(command, process, ours, log)

    def reported(played: Played, status: int) -> None:
        rows.append((played.command, played.seconds, played.silent_s, status, played.last_line))
        print(
            f"{played.seconds:6.1f} s  silent {played.silent_s:4.1f} s  exit {status}  {played.command[:90]}"
        )

    def stop_server() -> None:
        nonlocal server
        if server is not None:
            server.begin_s = server._last_s = time.monotonic()
            server.silent_s, server.command = 0.0, "Ctrl-C"
            os.killpg(server.process.pid, signal.SIGINT)
            server.read_until(timeout_s=60.0)
            reported(server, max(server.end(), 0) % 130)
            server = None

    for command in ("make demo", *(c for f in FILES for c in commands((ROOT / f).read_text()))):
        if ELSEWHERE.search(command) or (rows and command.startswith("make demo")):
            continue
        if is_server(command):
            stop_server()
            server = begin(command)
            server.read_until("serving on")
            reported(server, 0 if "serving on" in server.text else 1)
            continue
        if command.startswith("manta bench"):
            stop_server()
        played = begin(command.replace(" ID ", f" {answer_id} ").replace("-o out/ ", "-o out/readme/ "))
        if command.startswith("manta chat"):
            played.read_until(">")
            os.write(played.terminal, CHAT.encode())
        played.read_until()
        reported(played, played.end())
        answer_id = (ANSWER_ID.findall(played.text) or [answer_id])[-1]
        with contextlib.suppress(OSError):
            os.close(played.terminal)
    stop_server()
    return rows


def main(output: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "manta"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        with output.with_suffix(".log").open("w", encoding="utf-8") as log:
            rows = play(clone, log)
    machine = provenance()
    lines = [
        "# The first ten minutes",
        "",
        f"Made by `python tests/trials first_ten_minutes docs/benchmarks/{output.name}` on",
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores,",
        f"commit {str(machine['git_sha'])[:8]}.",
        "Commands of README and tutorial in a fresh clone and environment; the first one installs.",
        "*Silent* is the longest time in which a command printed nothing.",
        "",
        "| command | s | silent, s | exit | last line |",
        "|---|---|---|---|---|",
    ]
    for command, seconds, silent_s, status, last in rows:
        first = command.splitlines()[0].partition("#")[0].strip()[:70].replace("|", "\\|")
        lines.append(
            f"| `{first}` | {seconds:.1f} | {silent_s:.1f} | {status} | {last[:80].replace('|', ' ')} |"
        )
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(any(status or silent_s > MAX_SILENT_S for _, _, silent_s, status, _ in rows))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

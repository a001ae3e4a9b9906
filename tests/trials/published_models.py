"""Compares published GGUF models with transformers and llama.cpp, token by token.

    python tests/trials published_models FILE.gguf ... [--short] [--llama-perplexity PROGRAM]
        [--only answers | server] [-o OUTPUT.json]

For each file, in fp32: greedy answers to chats and continuations of texts, two of them of 6,000 tokens, are
those of transformers on the weights that it dequantizes itself. In fp32 and in the default dtype: drafts by
suffixes, by a DFlash drafter with random weights and by trees of its drafts change no token at three
temperatures. Streamed text is the text of all tokens at once. The perplexity of a fixed text, as llama.cpp's
program computes it, is reported beside llama.cpp's on the same file; so are the times until the file is read
and until a server gives its first token (of an idle machine), and the memory of weights and of a server with
a context of 4,096 tokens. Exit status 1: something differs. A test runs a little of it
(`test_published_models.py`).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from manta import LLM, SamplingParams
from manta.actors.checkpoints.checkpoint_paths import resolve_checkpoint
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.jobs.bench.common.provenance import provenance
from support.checkpoints.tiny import changed, make_tiny_drafter
from support.paths import ROOT
from support.servers.served import Served, environment

QUESTIONS = (
    "Explain {} in three sentences.",
    "Write a short story about {}.",
    "Give a numbered list of five facts about {}.",
    "What would a child ask about {}?",
    "Translate the words '{}' into French and German.",
)
SUBJECTS = ("the sea", "bicycles", "prime numbers", "the moon", "a lost key", "bread")
LONG_TOKENS, ANSWER_TOKENS = 6000, 200
HALVES = ("server", "answers")
SHORT = 6  # the share of prompts that --short compares
# A smaller gap between the two best logits is a tie: sums in another order decide it.
TIE = 1e-3
WINDOW = 512  # tokens of a text that llama.cpp's program reads at once; of each half of it counts
DRAFTS: dict[str, dict[str, Any] | None] = {
    "suffix": {"method": "suffix"},
    "DFlash": {"method": "dflash", "num_speculative_tokens": 5},
    "trees": {"method": "dflash", "num_speculative_tokens": 5, "tree_width": 3},
}


def document() -> str:
    return "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


class Model:
    """A GGUF file, and what two programs say of it.

    Args:
        share: one in `share` of the prompts is compared; with more than `SHORT`, none of 6,000 tokens.
    """

    def __init__(self, file: Path, *, share: int = 1) -> None:
        self.file, self._share = file, share
        self._tokenizer = Tokenizer.load(resolve_checkpoint(str(file), field="model"))
        self.figures: dict[str, Any] = {}
        self.num_wrong = 0

    def report(self, name: str, wrong: int, total: int) -> None:
        self.num_wrong += wrong
        self.figures[name] = {"differ": wrong, "of": total}
        print(f"{self.file.name}: {name}: {wrong} of {total} differ", flush=True)

    def prompts(self) -> list[list[int]]:
        """Return token ids of chats, if the model has a template, and of texts."""
        tokenizer, text = self._tokenizer, document()
        questions = [each.format(subject) for each in QUESTIONS for subject in SUBJECTS]
        chats: list[list[int]] = []
        if tokenizer.template is not None:
            messages = ([{"role": "user", "content": question}] for question in questions)
            rendered = map(tokenizer.apply_chat_template, messages)
            chats = [tokenizer.encode(each, add_special_tokens=False) for each in rendered]
        parts = [text[start : start + 700] for start in range(0, 20 * 5000, 5000)]
        texts = [tokenizer.encode(part) for part in parts]
        whole = tokenizer.encode(text[: 8 * LONG_TOKENS])
        texts[-2:] = [whole[:LONG_TOKENS], [*whole[:1], *whole[-LONG_TOKENS:]]]
        num_long = {1: 2, SHORT: 1}.get(self._share, 0)
        return [*chats[:: self._share], *texts[: -2 : self._share], *texts[-2:][:num_long]]

    def compare_with_transformers(self, prompts: Sequence[list[int]]) -> None:
        longest = max(map(len, prompts)) + ANSWER_TOKENS
        llm = LLM(str(self.file), dtype="float32", max_model_len=longest + 1)
        params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
        answers = [
            each.outputs[0] for each in llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        ]
        self._check_texts(answers)
        del llm
        gc.collect()
        oracle = transformers.AutoModelForCausalLM.from_pretrained(
            self.file.parent, gguf_file=self.file.name, dtype=torch.float32
        )
        wrong = ties = total = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = [*prompt, *answer.token_ids]
            with torch.inference_mode():
                hidden = oracle.model(torch.tensor([ids[:-1]])).last_hidden_state[0, len(prompt) - 1 :]
                logits = oracle.lm_head(hidden)
            given = torch.tensor(list(answer.token_ids))
            gaps = logits.amax(1) - logits.gather(1, given.unsqueeze(1)).squeeze(1)
            wrong, ties = wrong + int((gaps > TIE).sum()), ties + int(((gaps > 0) & (gaps <= TIE)).sum())
            total += len(given)
        self.report(f"greedy tokens in fp32 against transformers ({ties} ties)", wrong, total)

    def _check_texts(self, answers: Sequence[Any]) -> None:
        wrong = 0
        for answer in answers:
            stream = self._tokenizer.detokenizer([], skip_special_tokens=True)
            pieces = "".join(stream.step([token]) for token in answer.token_ids) + stream.flush()
            wrong += pieces != self._tokenizer.decode(list(answer.token_ids))
        self.report("texts streamed token by token", wrong, len(answers))

    def compare_drafts(
        self,
        prompts: Sequence[list[int]],
        dtypes: Sequence[str] = ("float32", "auto"),
        kinds: Sequence[str] = tuple(DRAFTS),
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            drafter = random_drafter(self.file, Path(folder))
            for dtype in dtypes:
                self._compare_drafts(prompts, drafter, dtype, kinds)

    def _compare_drafts(
        self, prompts: Sequence[list[int]], drafter: Path, dtype: str, kinds: Sequence[str]
    ) -> None:
        params = [
            SamplingParams(temperature=t, seed=7, max_tokens=80 if self._share == 1 else 40, ignore_eos=True)
            for t in (0.0, 0.7, 1.0)
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts for _ in params]
        plain: list[tuple[int, ...]] = []
        for name in ("none", *kinds):
            spec = DRAFTS.get(name)
            if spec is not None and spec["method"] == "dflash":
                spec = {**spec, "model": str(drafter), "adaptive": False}
            llm = LLM(str(self.file), dtype=dtype, max_model_len=512, speculative_config=spec)
            found = [tuple(o.outputs[0].token_ids) for o in llm.generate(inputs, params * len(prompts))]
            del llm
            gc.collect()
            plain = plain or found
            wrong = sum(mine != theirs for mine, theirs in zip(found, plain, strict=True))
            if name != "none":
                self.report(f"answers with drafts by {name} in {dtype}", wrong, len(found))

    def measure_server(self) -> None:
        """Measure the start of a server, and the memory of its worker and its replica after an answer."""
        settings = {"model": str(self.file), "max_model_len": 4096}
        with tempfile.TemporaryDirectory() as folder:
            with environment({"MANTA_CACHE_DIR": folder}):
                begin_s = time.perf_counter()
                Tokenizer.load(resolve_checkpoint(str(self.file), field="model"))
                read_s = time.perf_counter() - begin_s
            begin_s, log = time.perf_counter(), Path(folder) / "log"
            with Served(settings, log) as server:
                first_token_s = time.perf_counter() - begin_s
                pids = [server.pids(role) for role in ("target worker", "replica")]
                resident, own = (sum(memory(pid, kind) for (pid,) in pids) for kind in ("Rss", "Pss"))
                packed = re.search(r"packed weights of the target take ([\d.,]+) MiB", log.read_text())
        size = self.file.stat().st_size
        weights = float(packed[1].replace(",", "")) * 2**20 if packed is not None else math.nan
        self.figures |= {
            "read_s": round(read_s, 2),
            "first_token_s": round(first_token_s, 1),
            "weights_to_file": round(weights / size, 3),
            "server_resident_mb": round(resident / 1e6),
            "server_proportional_mb": round(own / 1e6),
        }
        print(
            f"{self.file.name}: read in {read_s:.2f} s; first token of a server after "
            f"{first_token_s:.1f} s; weights take {weights / size:.3f} of the file; worker and replica "
            f"{own / 1e6:.0f} MB (with pages that they share counted twice {resident / 1e6:.0f} MB)",
            flush=True,
        )

    def compare_perplexity(self, program: Path | None) -> None:
        num_windows = 40 if self._share == 1 else 4
        perplexity, text = self._perplexity(num_windows)
        self.figures["perplexity"] = round(perplexity, 4)
        theirs = ""
        if program is not None:
            other = llama_perplexity(program, self.file, text, num_windows)
            self.figures["llama.cpp_perplexity"] = other
            theirs = f", llama.cpp's {other:.4f} ({perplexity / other - 1:+.2%})"
        print(f"{self.file.name}: perplexity {perplexity:.4f}{theirs}", flush=True)

    def _perplexity(self, num_windows: int) -> tuple[float, str]:
        """Return the perplexity of a fixed text, and the text."""
        text = document()[: num_windows * WINDOW * 6]
        ids = self._tokenizer.encode(text)
        bos = self._tokenizer.encode("")
        windows = [ids[start : start + WINDOW] for start in range(0, num_windows * WINDOW, WINDOW)]
        windows = [[*bos, *each[len(bos) :]] for each in windows if len(each) == WINDOW]
        llm = LLM(str(self.file), dtype="float32", max_model_len=WINDOW + 1)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        total, count = 0.0, 0
        for window, output in zip(
            windows, llm.generate([{"prompt_token_ids": window} for window in windows], params), strict=True
        ):
            rows = output.prompt_logprobs
            assert rows is not None
            for token, row in list(zip(window, rows, strict=True))[WINDOW // 2 + 1 :]:
                assert row is not None
                total, count = total - row[token].logprob, count + 1
        return math.exp(total / count), text


def llama_perplexity(program: Path, file: Path, text: str, num_windows: int) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as written:
        written.write(text)
        written.flush()
        command = [program, "-m", file, "-f", written.name, "-c", str(WINDOW), "--chunks", str(num_windows)]
        done = subprocess.run([*command, "-b", str(WINDOW), "-ngl", "0"], capture_output=True, text=True)
    found = re.search(r"PPL = ([\d.]+)", done.stdout + done.stderr)
    assert found is not None, done.stderr[-2000:]
    return float(found[1])


def memory(pid: int, kind: str) -> int:
    """Return the bytes of a process: "Rss", or "Pss", which divides shared pages among their processes."""
    rolled = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (kilobytes,) = re.findall(rf"^{kind}: +(\d+) kB", rolled, re.MULTILINE)
    return int(kilobytes) * 1024


def read_figures(output: Path | None) -> dict[str, dict[str, Any]]:
    """Return what was written: `provenance` of each half, and `models`, the figures of each file."""
    if output is not None and output.is_file():
        return json.loads(output.read_text())
    return {"provenance": {}, "models": {}}


def random_drafter(file: Path, folder: Path) -> Path:
    """Write a DFlash drafter with random weights for the target."""
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size}
    made = make_tiny_drafter(folder / "sizes", head_dim=64, **sizes)  # a compiled pass has it
    return changed(made, folder / "drafter", num_target_layers=config.num_hidden_layers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--short", action="store_true", help="a sixth of the prompts")
    parser.add_argument("--llama-perplexity", type=Path, metavar="PROGRAM")
    parser.add_argument("--only", choices=HALVES, help="one half of the trial")
    parser.add_argument("-o", "--output", type=Path, help="JSON, to which figures are added")
    options = parser.parse_args()
    for file in options.files:
        if not file.is_file():
            raise SystemExit(f"{file} is no file")
    written = read_figures(options.output)
    halves = [half for half in HALVES if options.only in (None, half)]
    written["provenance"] |= dict.fromkeys(halves, provenance())
    figures, num_wrong = written["models"], 0
    for file in options.files:
        model = Model(file.resolve(), share=SHORT if options.short else 1)
        if "server" in halves:
            model.measure_server()
        if "answers" in halves:
            prompts = model.prompts()
            model.compare_with_transformers(prompts)
            model.compare_drafts([p for p in prompts if len(p) < 400][: 2 if options.short else 6])
            model.compare_perplexity(options.llama_perplexity)
        num_wrong += model.num_wrong
        figures[file.name] = figures.get(file.name, {}) | model.figures
        if options.output is not None:
            options.output.write_text(json.dumps(written, indent=1) + "\n")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Compares published GGUF models with transformers and llama.cpp, token by token.

    python tests/trials published_models FILE.gguf ... [--short] [--llama-perplexity PROGRAM]

For each file, in fp32: greedy answers to chats and continuations of texts, two of them of 6,000 tokens, are
those of transformers on the weights that it dequantizes itself. In fp32 and in the default dtype: drafts by
suffixes, by a DFlash drafter with random weights and by trees of its drafts change no token at three
temperatures. Streamed text is the text of all tokens at once. The perplexity of a fixed text, as llama.cpp's
program computes it, is reported beside llama.cpp's on the same file. Exit status 1: something differs.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from manta import LLM, SamplingParams
from manta.actors.checkpoints.checkpoint_paths import resolve_checkpoint
from manta.actors.tokenization.tokenizer import Tokenizer
from support.checkpoints.tiny import changed, make_tiny_drafter
from support.paths import ROOT

QUESTIONS = (
    "Explain {} in three sentences.",
    "Write a short story about {}.",
    "Give a numbered list of five facts about {}.",
    "What would a child ask about {}?",
    "Translate the words '{}' into French and German.",
)
SUBJECTS = ("the sea", "bicycles", "prime numbers", "the moon", "a lost key", "bread")
LONG_TOKENS, ANSWER_TOKENS = 6000, 200
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
    """A GGUF file, and what two programs say of it."""

    def __init__(self, file: Path, *, short: bool) -> None:
        self.file, self._short = file, short
        self._tokenizer = Tokenizer.load(resolve_checkpoint(str(file), field="model"))
        self.num_wrong = 0

    def report(self, name: str, wrong: int, total: int) -> None:
        self.num_wrong += wrong
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
        step = 6 if self._short else 1
        return [*chats[::step], *texts[:-2:step], *texts[-2:][: 1 if self._short else 2]]

    def compare_with_transformers(self, prompts: Sequence[list[int]]) -> None:
        llm = LLM(str(self.file), dtype="float32", max_model_len=LONG_TOKENS + ANSWER_TOKENS + 1)
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

    def compare_drafts(self, prompts: Sequence[list[int]], drafter: Path) -> None:
        params = [
            SamplingParams(temperature=t, seed=7, max_tokens=40 if self._short else 80, ignore_eos=True)
            for t in (0.0, 0.7, 1.0)
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts for _ in params]
        for dtype in ("float32", "auto"):
            plain: list[tuple[int, ...]] = []
            for name, spec in {"none": None, **DRAFTS}.items():
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

    def perplexity(self, num_windows: int) -> tuple[float, str]:
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


def random_drafter(file: Path, folder: Path) -> Path:
    """Write a DFlash drafter with random weights for the target."""
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size}
    made = make_tiny_drafter(folder / "sizes", head_dim=64, **sizes)  # a compiled pass has it
    return changed(made, folder / "drafter", num_target_layers=config.num_hidden_layers)


def models(files: Sequence[Path], *, short: bool) -> Iterator[Model]:
    for file in files:
        if not file.is_file():
            raise SystemExit(f"{file} is no file")
        yield Model(file.resolve(), short=short)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--short", action="store_true", help="a sixth of the prompts")
    parser.add_argument("--llama-perplexity", type=Path, metavar="PROGRAM")
    options = parser.parse_args()
    num_wrong = 0
    for model in models(options.files, short=options.short):
        prompts = model.prompts()
        model.compare_with_transformers(prompts)
        with tempfile.TemporaryDirectory() as folder:
            drafter = random_drafter(model.file, Path(folder))
            model.compare_drafts([p for p in prompts if len(p) < 400][: 2 if options.short else 6], drafter)
        num_windows = 4 if options.short else 40
        perplexity, text = model.perplexity(num_windows)
        theirs = ""
        if options.llama_perplexity is not None:
            other = llama_perplexity(options.llama_perplexity, model.file, text, num_windows)
            theirs = f", llama.cpp's {other:.4f} ({perplexity / other - 1:+.2%})"
        print(f"{model.file.name}: perplexity {perplexity:.4f}{theirs}", flush=True)
        num_wrong += model.num_wrong
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

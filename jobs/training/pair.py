"""`manta train-pair`: make the shipped pair from nothing but the standard library, on two cores or a GPU.

Corpus and tokenizer -> target -> its surest continuations through this engine -> target and drafter
together -> continuations again -> drafter -> figures.
Every stage leaves its result in `work_dir`; a killed run goes on where it was. Training itself is in the
other files of this folder; here is the order, the clock and the engine.
"""

import ctypes
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from ...actors.llm import LLM
from ...cluster.request import SamplingParams
from ..tables import decimals
from . import corpus
from .budget import TimeBudget
from .cards import PairFacts, RunFacts, write_cards
from .continuations import (
    SPOKEN_TEMPERATURES,
    SURE_TEMPERATURES,
    Continuations,
    Generate,
    Question,
    corpus_sequences,
    questions,
)
from .drafter import FrozenTarget, new_drafter, train_drafter
from .evaluate import Figures, evaluate
from .export import export_drafter, export_target
from .loop import Report
from .model import TrainableDrafter
from .prompts import Prompt, all_prompts, read_prompts, select_prompts, write_prompts
from .repetition import before_repetition
from .snapshots import load_snapshot
from .target import held_out_loss, tame_unseen_embedding, target_config, train_target
from .together import train_together
from .tokenizer import END_OF_TEXT, IM_END, MASK, special_id, train_tokenizer, write_tokenizer_files
from .tokens import TokenStore, corpus_texts, encode_documents

PROMPTS_PER_CATEGORY = 48
NUM_QUESTIONS = 9000
QUESTIONS_PER_SHARD = 512
MAX_NEW_TOKENS = 192
NUM_RUNNING = 192  # continuations at once
EVALUATION_TOKENS = 128
EVALUATION_TEMPERATURES = (0.0, 1.0)
HELD_OUT_WINDOW_TOKENS = 512
TARGET_SNAPSHOT, TOGETHER_SNAPSHOT, DRAFTER_SNAPSHOT = "target.pt", "together.pt", "drafter.pt"


@dataclass(frozen=True)
class Shares:
    """How the hours are divided; the rest is left for the figures."""

    target: float = 0.38
    first_continuations: float = 0.05
    together: float = 0.36
    continuations: float = 0.05
    drafter: float = 0.11


def train_pair(
    output_dir: Path,
    work_dir: Path,
    hours: float = 2.75,
    threads: int | None = None,
    report: Report = lambda line: print(line, flush=True),
) -> list[Figures]:
    """Write `target/`, `drafter/` and `prompts.jsonl` under `output_dir`; returns the held-out figures.

    Args:
        work_dir: snapshots and data; give the same one again to go on after a kill.
        hours: time for all stages together; the learning rates follow the clock.
        threads: torch's threads on a CPU; its own choice if None.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    keep_freed_memory()
    return _PairJob(output_dir, work_dir, hours * 3600, report).run()


class _PairJob:
    """The stages in order; each reads what the ones before it left on disk."""

    def __init__(self, output_dir: Path, work_dir: Path, budget_s: float, report: Report) -> None:
        self._output, self._work = output_dir, work_dir
        self._budget_s, self._report = budget_s, report
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._files = corpus.library_files()
        self._learned = [file for file in self._files if not file.is_held_out]
        self._held_out = [file for file in self._files if file.is_held_out]

    def run(self) -> list[Figures]:
        tokenizer = self._make_tokenizer()
        store = encode_documents(tokenizer, corpus_texts(self._learned))
        self._report(f"corpus: {len(store.ids)} tokens")
        held_out = encode_documents(tokenizer, corpus_texts(self._held_out))
        target = self._make_target(tokenizer, store)
        loss_alone = held_out_loss(target, held_out, HELD_OUT_WINDOW_TOKENS, self._device)
        self._report(f"held-out loss of the target alone: {loss_alone:.3f}")
        sure_data = self._make_continuations(
            tokenizer, store, "sure", SURE_TEMPERATURES, before_repetition, Shares.first_continuations
        )
        drafter = self._train_together(tokenizer, target, store, sure_data)
        loss = held_out_loss(target, held_out, HELD_OUT_WINDOW_TOKENS, self._device)
        self._report(f"held-out loss: {loss:.3f}")
        data = self._make_continuations(
            tokenizer, store, "spoken", SPOKEN_TEMPERATURES, list, Shares.continuations
        )
        self._train_drafter(tokenizer, target, drafter, data)
        figures = self._measure(tokenizer, target, drafter)
        facts = PairFacts(
            machine=_machine(self._device),
            target=self._run_facts(TARGET_SNAPSHOT),
            together=self._run_facts(TOGETHER_SNAPSHOT),
            drafter=self._run_facts(DRAFTER_SNAPSHOT),
            num_target_parameters=target.num_parameters(),
            num_drafter_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
            num_corpus_tokens=len(store.ids),
            num_continuation_tokens=len(data.ids),
            num_evaluation_tokens=EVALUATION_TOKENS,
            held_out_loss_alone=loss_alone,
            held_out_loss=loss,
            figures=figures,
        )
        write_cards(self._output, facts)
        return figures

    def _make_tokenizer(self) -> Tokenizer:
        folder = self._output / "target"
        if not (folder / "tokenizer.json").exists():
            self._report(f"tokenizer: {len(self._learned)} files, {len(self._held_out)} held out")
            write_tokenizer_files(train_tokenizer(corpus_texts(self._learned)), folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if not (self._output / "prompts.jsonl").exists():
            found = all_prompts(self._held_out, tokenizer, seed=0)
            chosen = select_prompts(found, PROMPTS_PER_CATEGORY, seed=0)
            write_prompts(chosen, self._output / "prompts.jsonl")
        return tokenizer

    def _make_target(self, tokenizer: Tokenizer, store: TokenStore) -> Qwen3ForCausalLM:
        end_ids = [special_id(tokenizer, END_OF_TEXT), special_id(tokenizer, IM_END)]
        config = target_config(end_ids, self._device)
        snapshot, budget_s = self._work / TARGET_SNAPSHOT, self._budget_s * Shares.target
        target = train_target(config, store, snapshot, budget_s, self._device, self._report)
        tame_unseen_embedding(target, special_id(tokenizer, MASK))
        export_target(target, self._output / "target")
        return target

    def _make_continuations(
        self,
        tokenizer: Tokenizer,
        store: TokenStore,
        name: str,
        temperatures: Sequence[float],
        keep: Callable[[Sequence[int]], list[int]],
        share: float,
    ) -> Continuations:
        """Shards of questions until all are asked or the time is over; finished shards are kept.

        Args:
            keep: the part of an answer to learn from.
        """
        asked = questions(self._learned, store, tokenizer, NUM_QUESTIONS, temperatures, seed=1)
        folder = self._work / f"continuations-{name}"
        used = folder / "used_s"  # a restart spends what is left of the time, not all of it anew
        budget = TimeBudget(self._budget_s * share, float(used.read_text()) if used.exists() else 0.0)
        shards: list[Continuations] = []
        with LLM(str(self._output / "target"), max_num_seqs=NUM_RUNNING) as llm:
            generate = _generator(llm, MAX_NEW_TOKENS)
            for start in range(0, len(asked), QUESTIONS_PER_SHARD):
                path = folder / f"{start:06}.npz"
                if not path.exists():
                    if shards and budget.progress >= 1.0:
                        break
                    part = asked[start : start + QUESTIONS_PER_SHARD]
                    Continuations.of(part, [keep(answer) for answer in generate(part)]).save(path)
                    used.write_text(f"{budget.used_s:.1f}")
                shards.append(Continuations.load(path))
                self._report(f"{name} continuations: {start + len(shards[-1])} of {len(asked)}")
        return Continuations.join(shards)

    def _train_together(
        self, tokenizer: Tokenizer, target: Qwen3ForCausalLM, store: TokenStore, data: Continuations
    ) -> TrainableDrafter:
        """The target changes once more here, and is exported again."""
        drafter = new_drafter(target)
        # By tokens about as much of each, by sequences four to one. The corpus keeps the target honest;
        # its own sure answers, which are what the drafter will have to foretell, make it decided.
        mixed = Continuations.join([data, data, corpus_sequences(store, len(data) // 2, seed=2)])
        ids = special_id(tokenizer, MASK), special_id(tokenizer, END_OF_TEXT)
        snapshot, budget_s = self._work / TOGETHER_SNAPSHOT, self._budget_s * Shares.together
        train_together(target, drafter, mixed, *ids, snapshot, budget_s, self._device, self._report)
        export_target(target, self._output / "target")
        return drafter

    def _train_drafter(
        self, tokenizer: Tokenizer, target: Qwen3ForCausalLM, drafter: TrainableDrafter, data: Continuations
    ) -> None:
        ids = special_id(tokenizer, MASK), special_id(tokenizer, END_OF_TEXT)
        snapshot, budget_s = self._work / DRAFTER_SNAPSHOT, self._budget_s * Shares.drafter
        train_drafter(target, drafter, data, *ids, snapshot, budget_s, self._device, self._report)
        export_drafter(drafter, target.config.num_hidden_layers, ids[0], self._output / "drafter")

    def _measure(
        self, tokenizer: Tokenizer, target: Qwen3ForCausalLM, drafter: TrainableDrafter
    ) -> list[Figures]:
        frozen = FrozenTarget(target, drafter.shape.target_layer_ids)
        prompts = read_prompts(self._output / "prompts.jsonl")
        figures: list[Figures] = []
        with LLM(str(self._output / "target")) as llm:
            generate = _generator(llm, EVALUATION_TOKENS)
            for temperature in EVALUATION_TEMPERATURES:
                asked = _evaluation_questions(tokenizer, prompts, temperature)
                answers = generate(asked)
                figures += evaluate(frozen, drafter, prompts, asked, answers, special_id(tokenizer, MASK))
        for row in figures:
            length = decimals(row.mean_acceptance_length)
            self._report(f"T={row.temperature:g} {row.category}: mean acceptance length {length}")
        return figures

    def _run_facts(self, name: str) -> RunFacts:
        snapshot = load_snapshot(self._work / name)
        assert snapshot is not None, "the stage has just saved it"
        return RunFacts(snapshot["step"], snapshot["tokens"], snapshot["used_s"])


def _generator(llm: LLM, max_new_tokens: int) -> Generate:
    def generate(asked: Sequence[Question]) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=q.temperature, seed=q.seed, max_tokens=max_new_tokens, detokenize=False
            )
            for q in asked
        ]
        outputs = llm.generate([list(q.prompt_ids) for q in asked], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def _evaluation_questions(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], temperature: float
) -> list[Question]:
    return [
        Question(tuple(tokenizer.encode(prompt.text, add_special_tokens=False).ids), temperature, seed)
        for seed, prompt in enumerate(prompts)
    ]


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} cores of {platform.processor() or platform.machine()}"


def keep_freed_memory() -> None:
    """Have glibc keep large blocks: mapping them anew for every tensor is a third of a step's time."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 256 * 2**20)

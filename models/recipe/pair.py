"""The stages in which the shipped pair is made from the standard library, on two cores or a GPU.

Corpus and tokenizer -> target -> its continuations at low temperatures through Manta's engine -> target and
drafter together -> continuations again -> drafter -> figures.
Every stage writes its result to `work_dir`; a killed run resumes. This file has the order of the stages, the
time budget and the engine; the other files of this folder and `jobs/training/` have the rest. Called by
`__main__.py`.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from ...actors.targets.model.tensor_parallel import Sharding
from ...actors.targets.model.weights import TargetWeights
from ...cluster.records.repetition import num_fresh_tokens
from ...drafter.compute.checkpoint.safetensors_reader import TensorFolder
from ...drafter.dflash.checkpoint import check_drafter
from ...jobs.common.tables import decimals
from ...jobs.training.heads.export import export_drafter
from ...jobs.training.heads.frozen_target import FrozenTarget
from ...jobs.training.heads.initialization import continued, drafter_config, facts_of, new_drafter
from ...jobs.training.heads.offline_proposals import BlockProposals
from ...jobs.training.heads.recipes import DrafterSettings, further_recipe
from ...jobs.training.heads.trainables import read_target
from ...jobs.training.loop.answering import TEMPERATURES, write_continuations
from ...jobs.training.loop.continuations import Continuations
from ...jobs.training.loop.training_loop import SNAPSHOT, Length, Report, load_snapshot
from ...jobs.training.train_drafter import freed_memory_kept, machine, train
from . import corpus
from .cards import PairFacts, RunFacts, write_cards
from .chat_samples import IM_END
from .evaluate import Figures, evaluate
from .prompt_selection import all_prompts, select_prompts
from .prompts import (
    EVALUATION_TOKENS,
    SURE_TEMPERATURES,
    held_out_answers,
    questions,
    read_prompts,
    write_prompts,
)
from .target import export_target, held_out_loss, tame_unseen_embedding, target_config, train_target
from .together import train_together
from .tokenizer import END_OF_TEXT, MASK, special_id, train_tokenizer, write_tokenizer_files
from .tokens import TokenStore, corpus_sequences, corpus_texts, encode_documents

PROMPTS_PER_CATEGORY = 48
NUM_QUESTIONS = 9000
EVALUATION_TEMPERATURES = (0.0, 1.0)
HELD_OUT_WINDOW_TOKENS, HELD_OUT_SEQUENCES = 512, 64
# The last stage trains the drafter that was trained with the target, with one more layer and a selector.
SHIPPED = replace(further_recipe("selector", is_small=False), num_layers=4)
TARGET_RUN, TOGETHER_RUN, DRAFTER_RUN = "target", "together", "drafter"
# What the pair learns together ends where 8 tokens repeat; the figures' 4 would cut a third more.
SURE_REPEATED_TOKENS = 8


@dataclass(frozen=True)
class Shares:
    """Each stage's share of the time; the rest is for the figures."""

    target: float = 0.32
    first_continuations: float = 0.04
    together: float = 0.305
    continuations: float = 0.04
    drafter: float = 0.25


def train_pair(
    output_dir: Path,
    work_dir: Path,
    hours: float = 3.25,
    threads: int | None = None,
    report: Report = lambda line: print(line, flush=True),
) -> list[Figures]:
    """Write `target/`, `drafter/` and `prompts.jsonl` under `output_dir`; return the held-out figures.

    Args:
        work_dir: snapshots and data; a killed run resumes with the same folder.
        hours: time for all stages; the learning rates follow the clock.
        threads: torch's threads on a CPU; None for torch's default.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with freed_memory_kept():
        return _PairJob(output_dir, work_dir, hours * 3600, report).run()


class _PairJob:
    """The stages in order; each reads the files of the stages before it."""

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
            tokenizer, store, "sure", SURE_TEMPERATURES, _before_repetition, Shares.first_continuations
        )
        self._train_together(tokenizer, target, store, sure_data)
        loss = held_out_loss(target, held_out, HELD_OUT_WINDOW_TOKENS, self._device)
        self._report(f"held-out loss: {loss:.3f}")
        data = self._make_continuations(tokenizer, store, "spoken", TEMPERATURES, list, Shares.continuations)
        self._train_drafter(data)
        figures = self._measure(tokenizer)
        facts = PairFacts(
            machine=machine(),
            target=self._run_facts(TARGET_RUN),
            together=self._run_facts(TOGETHER_RUN),
            drafter=self._run_facts(DRAFTER_RUN),
            num_target_parameters=target.num_parameters(),
            num_drafter_parameters=sum(map(prod, TensorFolder(self._output / "drafter").shapes.values())),
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
        snapshot, budget_s = self._work / TARGET_RUN, self._budget_s * Shares.target
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
        requests = questions(self._learned, store, tokenizer, NUM_QUESTIONS, temperatures, seed=1)
        folder, budget_s = self._work / f"continuations-{name}", self._budget_s * share
        return write_continuations(self._output / "target", requests, folder, budget_s, self._report, keep)

    def _train_together(
        self, tokenizer: Tokenizer, target: Qwen3ForCausalLM, store: TokenStore, data: Continuations
    ) -> None:
        """Train target and drafter together and export both; the target is exported for the second time."""
        spec, folder = read_target(self._output / "target")
        config = drafter_config(spec, DrafterSettings(), special_id(tokenizer, MASK))
        whole = Sharding(spec, 0, 1)
        drafter = new_drafter(config, TargetWeights(folder, spec, whole, torch.float32, torch.device("cpu")))
        # About equal numbers of tokens of both kinds, four to one by sequences. The corpus keeps the
        # next-token loss low; the target's own low-temperature answers make its distribution sharper, and
        # are the text that the drafter will have to predict.
        mixed = Continuations.join([data, data, corpus_sequences(store, len(data) // 2, seed=2)])
        ids = special_id(tokenizer, MASK), special_id(tokenizer, END_OF_TEXT)
        folder, budget_s = self._work / TOGETHER_RUN, self._budget_s * Shares.together
        train_together(target, drafter, mixed, *ids, folder, budget_s, self._device, self._report)
        export_target(target, self._output / "target")
        export_drafter(drafter, spec, folder / "drafter")

    def _train_drafter(self, data: Continuations) -> None:
        learned, held_out = data.split_off(HELD_OUT_SEQUENCES)
        trained = train(
            self._output / "target",
            learned,
            held_out,
            self._work / DRAFTER_RUN,
            Length(seconds=self._budget_s * Shares.drafter),
            initial=self._work / TOGETHER_RUN / "drafter",
            settings=SHIPPED,
            report=self._report,
        )
        shutil.copytree(trained.drafter, self._output / "drafter", dirs_exist_ok=True)

    def _measure(self, tokenizer: Tokenizer) -> list[Figures]:
        target, spec = self._output / "target", read_target(self._output / "target")[0]
        config = check_drafter(self._output / "drafter", facts_of(spec))
        prompts = read_prompts(self._output / "prompts.jsonl")
        frozen = FrozenTarget(target, config.target_layer_ids, spec.max_position_embeddings, self._device)
        config = continued(config, DrafterSettings(), spec.embed_scale)
        drafter = new_drafter(config, frozen.weights, self._output / "drafter").to(self._device)
        requests = held_out_answers(target, tokenizer, prompts, EVALUATION_TEMPERATURES)
        figures = [
            row
            for questions, answers in requests
            for row in evaluate(BlockProposals(frozen, drafter), frozen, prompts, questions, answers)
        ]
        for row in figures:
            length = decimals(row.mean_acceptance_length)
            self._report(f"T={row.temperature:g} {row.category}: mean acceptance length {length}")
        return figures

    def _run_facts(self, name: str) -> RunFacts:
        snapshot = load_snapshot(self._work / name / SNAPSHOT)
        assert snapshot is not None, "the stage has just saved it"
        return RunFacts(snapshot["step"], snapshot["tokens"], snapshot["used_s"])


def _before_repetition(answer: Sequence[int]) -> list[int]:
    return list(answer[: num_fresh_tokens(answer, SURE_REPEATED_TOKENS)])

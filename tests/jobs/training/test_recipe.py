"""The recipe of the shipped pair: its tokenizer and text, joint training, the figures of its cards."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from jinja2 import Environment
from manta.drafter.step.inputs.sampling_metadata import SamplingMetadata
from manta.drafter.step.sampling.sampler import sample_rows
from manta.jobs.training.heads.dflash_module import TrainableDrafter
from manta.jobs.training.heads.frozen_target import FrozenTarget
from manta.jobs.training.heads.offline_proposals import BlockProposals
from manta.jobs.training.loop.continuations import ContinuationRequest
from manta.models.recipe.cards import PairFacts, RunFacts, figures_table, write_cards
from manta.models.recipe.chat_samples import render_chat
from manta.models.recipe.corpus import is_held_out
from manta.models.recipe.evaluate import (
    Figures,
    accepted_lengths,
    count_steps,
    evaluate,
)
from manta.models.recipe.prompt_cuts import CATEGORIES
from manta.models.recipe.prompt_selection import MAX_PROMPT_TOKENS, MIN_PROMPT_TOKENS, Prompt
from manta.models.recipe.prompts import read_prompts
from manta.models.recipe.target import products_attention
from manta.models.recipe.together import TogetherSettings, train_together
from manta.models.recipe.tokenizer import CHAT_TEMPLATE
from manta.models.recipe.tokens import TokenStore, WindowReader, corpus_sequences, encode_documents
from support.checkpoints.tiny import tiny_training_config
from support.checkpoints.training_targets import continuations, random_target, small_config
from support.paths import MODELS
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

MASK_ID = 63
CONFIG = tiny_training_config()
SOURCE = '''def area(width, height):
    """Return the area of a rectangle with these sides, no more."""
    return width * height
'''


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))


class PerfectDrafter(TrainableDrafter):
    """A perfect drafter: it returns the target's own hidden state before every slot."""

    states: torch.Tensor

    def forward(self, features_BTF, blocks_BASD, anchors_BA):
        slots = torch.arange(blocks_BASD.shape[2])
        positions = (anchors_BA[..., None] + slots - 1).clamp(max=self.states.shape[1] - 1)
        return self.states[0][positions]


def setting() -> tuple[Qwen3ForCausalLM, PerfectDrafter]:
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(CONFIG)
    torch.nn.init.normal_(target.lm_head.weight, std=0.3)
    return target, PerfectDrafter(small_config(mask_token_id=MASK_ID))


def row_sampling(question: ContinuationRequest, position: int) -> SamplingMetadata:
    return SamplingMetadata.build(
        temperature=np.array([question.temperature], dtype=np.float32),
        top_k=np.zeros(1, dtype=np.int64),
        top_p=np.ones(1, dtype=np.float32),
        min_p=np.zeros(1, dtype=np.float32),
        seed=np.array([question.seed], dtype=np.int64),
        position=np.array([position], dtype=np.int64),
    )


def write(target: Qwen3ForCausalLM, question: ContinuationRequest, num_tokens: int) -> list[int]:
    tokens = list(question.prompt_ids)
    for _ in range(num_tokens):
        logits = target(torch.tensor([tokens])).logits[0, -1:].float()
        tokens.append(int(sample_rows(logits, row_sampling(question, len(tokens)))))
    return tokens[len(question.prompt_ids) :]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.if_changed), 1.0])
def test_a_drafter_that_equals_the_target_has_every_draft_accepted(temperature: float, tmp_path: Path):
    target, drafter = setting()
    target.save_pretrained(tmp_path)
    frozen = FrozenTarget(tmp_path, (1, 2), max_tokens=64, device=torch.device("cpu"))
    question = ContinuationRequest(tuple(range(5, 12)), temperature, seed=11)
    with torch.no_grad():
        answer = write(target, question, 13)
        tokens = torch.tensor([[*question.prompt_ids, *answer]])
        drafter.states = target.model(tokens).last_hidden_state
    proposals = BlockProposals(frozen, drafter)
    lengths = accepted_lengths(proposals, frozen, question, answer)
    assert lengths == [3] * 10 + [2, 1], "whole blocks, cut at the answer's end"
    prompt = Prompt("m.py:1", "chat", "text")
    (category, overall) = evaluate(proposals, frozen, [prompt], [question], [answer])
    assert (category.category, overall.category) == ("chat", "overall")
    assert overall.num_steps == 3
    assert overall.mean_acceptance_length == 4.0
    assert overall.fresh_acceptance_length <= 4.0


def test_steps_are_counted_as_in_an_engine():
    assert count_steps([0, 0, 0]) == 3
    assert count_steps([2, 9, 9, 0]) == 2
    assert count_steps([]) == 0


def test_cards_contain_the_figures(tmp_path):
    figures = [
        Figures(category, temperature, 40, 5000, 1000, 4.96 - temperature, 0.25, 2.5)
        for temperature in (0.0, 1.0)
        for category in ("chat", "overall")
    ]
    facts = PairFacts(
        machine="2 cores",
        target=RunFacts(10, 40960, 60.0),
        together=RunFacts(15, 30000, 90.0),
        drafter=RunFacts(20, 4000, 120.0),
        num_target_parameters=8_000_000,
        num_drafter_parameters=1_000_000,
        num_corpus_tokens=3_000_000,
        num_continuation_tokens=1_000_000,
        num_evaluation_tokens=128,
        held_out_loss_alone=2.4,
        held_out_loss=2.5,
        figures=figures,
    )
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
    write_cards(tmp_path, facts)
    assert "| overall | 40 | 4.96 | 2.50 | 25% | 3.96 | 2.50 | 25% |" in figures_table(figures)
    assert figures_table(figures) in (tmp_path / "drafter" / "README.md").read_text()
    assert "2.500 nats" in (tmp_path / "target" / "README.md").read_text()


def test_prompts_come_from_held_out_files_only_in_every_category(tokenizer):
    prompts = read_prompts(MODELS / "prompts.jsonl")
    assert len(prompts) >= 200
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 30
    for prompt in prompts:
        assert is_held_out(prompt.id.rsplit(":", 1)[0])
        num_tokens = len(tokenizer.encode(prompt.text, add_special_tokens=False).ids)
        assert MIN_PROMPT_TOKENS <= num_tokens <= MAX_PROMPT_TOKENS


def test_the_chat_template_renders_the_same_everywhere():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "What does `abs` do?"}]
    expected = "<|im_start|>user\nWhat does `abs` do?<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(messages, add_generation_prompt=True) == expected
    rendered = Environment().from_string(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    assert rendered == expected
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == expected


def test_the_tokenizer_has_4096_tokens_and_loses_no_byte(tokenizer):
    assert tokenizer.get_vocab_size() == 4096
    text = "def f(x):\n\treturn 'gr\u00fc\u00dfe \U0001f600 12345'  # \x00\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    generation = json.loads((MODELS / "target" / "generation_config.json").read_text())
    names = [tokenizer.id_to_token(i) for i in generation["eos_token_id"]]
    assert names == ["<|endoftext|>", "<|im_end|>"]


def test_a_repositioned_reader_continues_like_the_first(tokenizer):
    store = encode_documents(tokenizer, [SOURCE * n for n in range(1, 8)])
    reader = WindowReader(store)
    for _ in range(3):
        reader.next_batch(2, 64)
    other = WindowReader(store)
    other.seek(reader.position)
    assert (other.next_batch(2, 64) == reader.next_batch(2, 64)).all()


def test_a_stored_corpus_is_read_back_completely(tmp_path: Path, tokenizer):
    store = encode_documents(tokenizer, [SOURCE, SOURCE * 200])
    store.save(tmp_path / "corpus.npz")
    loaded = TokenStore.load(tmp_path / "corpus.npz")
    assert (loaded.ids == store.ids).all() and (loaded.bounds == store.bounds).all()
    assert len(loaded.shuffled(0)) == len(store.ids)
    assert loaded.num_pieces > 2


def test_attention_as_products_equals_torchs_in_value_and_gradient():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 12, 8, generator=generator, requires_grad=True)
    key, value = (torch.randn(2, 2, 12, 8, generator=generator, requires_grad=True) for _ in range(2))
    out, _ = products_attention(torch.nn.Identity(), query, key, value, None, scaling=8**-0.5)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(
        1, 2
    )
    torch.testing.assert_close(out, expected)
    toward = torch.randn(out.shape, generator=generator)
    gradients = torch.autograd.grad((out * toward).sum(), (query, key, value))
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * toward).sum(), (query, key, value)))


def test_joint_training_changes_both_models_but_not_the_mask_embedding(tmp_path: Path):
    target, mask_id = random_target(), 63
    drafter = TrainableDrafter(small_config(target_layer_ids=(1, 3)))
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    fc_before = drafter.fc.weight.clone()
    settings = TogetherSettings(batch_size=4, num_anchors=3, block_stages=((0.0, 4),))
    run = (continuations(), mask_id, 0, tmp_path / "together", 0.1, torch.device("cpu"), lambda _: None)
    train_together(target, drafter, *run, settings)
    after = target.state_dict()
    assert not torch.equal(drafter.fc.weight, fc_before)
    assert not torch.equal(
        after["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )
    embedding = "model.embed_tokens.weight"
    assert torch.equal(after[embedding][mask_id], before[embedding][mask_id])
    assert not torch.equal(after[embedding][:mask_id], before[embedding][:mask_id])


def test_pieces_of_the_corpus_look_like_continuations():
    store = TokenStore(np.arange(3000, dtype=np.uint16), np.array([0, 1000, 3000]))
    data = corpus_sequences(store, 5, seed=0)
    assert len(data) == 5
    assert set(np.diff(data.bounds)) == {280}
    assert len(set(data.ids.tolist())) == len(data.ids) == 1400

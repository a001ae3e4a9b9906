"""A target sharded over ranks computes what one rank does. Ranks are threads here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.loading.rank_loader import load_runner
from manta.actors.targets.model.attention import TargetAttention
from manta.actors.targets.model.decoder import Decoder
from manta.actors.targets.model.mlp_weights import DenseTensors, MlpTensors, ParallelMlpTensors, RoutedTensors
from manta.actors.targets.model.model_spec import ModelSpec
from manta.actors.targets.model.tensor_parallel import (
    Sharding,
    SingleRank,
    VocabHead,
    smallest,
    vocab_embedding,
)
from manta.cluster.errors import ConfigError
from manta.drafter.compute.layers.linear import Linear
from manta.drafter.step.inputs.proposals import Proposals
from support.checkpoints.drafters import eagle3_speculators, write_drafter
from support.checkpoints.families import FAMILIES
from support.checkpoints.tiny import TINY_VOCAB, make_tiny_drafter, make_tiny_target
from support.engines.steps import settings
from support.engines.thread_ranks import PROMPTS, ThreadRank, ThreadRanks, tokens_by_steps, tokens_of_ranks
from support.oracles.decoder_requests import weights_of

SPLIT = [name for name, family in FAMILIES.items() if not family.composed]


@pytest.fixture(scope="module", params=SPLIT)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a target with a vocabulary that no number of ranks divides."""
    return make_tiny_target(tmp_path_factory.mktemp(request.param), request.param, vocab_size=TINY_VOCAB - 1)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    return tokens_by_steps(load_runner(settings(target, num_pages=80))[0], PROMPTS, 6)


@pytest.mark.parametrize("target", [name for name in SPLIT if not FAMILIES[name].lean], indirect=True)
def test_four_ranks_that_share_two_kv_heads_give_the_tokens_of_one(
    target: Path, expected: list[list[int]]
) -> None:
    assert tokens_of_ranks(settings(target, num_pages=80, tensor_parallel_size=4), 6) == expected


def test_ranks_with_whole_experts_add_up_to_the_whole(tmp_path: Path) -> None:
    """Four ranks cannot split 30 inner states, only 8 experts."""
    folder = make_tiny_target(tmp_path, "qwen3_moe", moe_intermediate_size=30)
    whole, _ = load_runner(settings(folder, num_pages=80))
    expected = tokens_by_steps(whole, PROMPTS, 6)
    assert tokens_of_ranks(settings(folder, num_pages=80, tensor_parallel_size=4), 6) == expected


@pytest.mark.one_in(2)
def test_two_drafting_ranks_give_the_tokens_of_one_plain_rank(
    target: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    hidden = read_model(target).hidden_size
    drafter = make_tiny_drafter(tmp_path / "drafter", vocab_size=TINY_VOCAB - 1, hidden_size=hidden)
    found = tokens_of_ranks(settings(target, drafter, num_pages=80, tensor_parallel_size=2), 6)
    assert [mine[: len(e)] for mine, e in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize("method", ["dflash", "dspark", "eagle3"])
def test_a_drafter_proposes_the_same_on_two_ranks(method: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    """DFlash2's and DSpark's candidates come from a split head, EAGLE-3's rows from a split embedding."""
    if method == "eagle3":
        drafter = write_drafter(tmp_path / "drafter", eagle3_speculators())
    else:
        head = {"second": True} if method == "dflash" else {"dspark": True}
        drafter, method = make_tiny_drafter(tmp_path / "drafter", **head), "dflash"
    spec = {"method": method, "model": str(drafter), "adaptive": False}

    def proposals(runner) -> list[list[list[int]]]:
        found, propose = [], runner.drafts.propose

        def listen(*args: object) -> Proposals:
            found.append((proposals := propose(*args)).drafts_RK.tolist())
            return proposals

        runner.drafts.propose = listen
        tokens_by_steps(runner, PROMPTS, 3)
        return found

    config = settings(tiny_qwen3, speculative_config=spec, num_pages=80)
    expected = proposals(load_runner(config)[0])
    config = replace(config, tensor_parallel_size=2)
    assert ThreadRanks(2).run(lambda rank: proposals(load_runner(config, rank)[0])) == [expected] * 2
    assert sum(len(row) for step in expected for row in step) == 3 * 3 * len(PROMPTS)


def test_ranks_read_only_their_slices(target: Path) -> None:
    config = read_model(target)
    parts, whole = [weights_of(target, rank=rank, ranks=2) for rank in (0, 1)], weights_of(target)
    first, second, all_of = parts[0].layer(0), parts[1].layer(0), whole.layer(0)
    assert torch.equal(torch.cat((first.o_HO, second.o_HO), dim=1), all_of.o_HO)
    if isinstance(mixer := config.layers[0].mixer, TargetAttention) and mixer.latent is not None:
        # Latents are whole everywhere, what heads make of them is not.
        assert torch.equal(second.qkv_OH, all_of.qkv_OH)
        for name in ("q_up_OK", "kv_up_UC"):
            halves = torch.cat([getattr(part.latent, name) for part in (first, second)])
            assert torch.equal(halves, getattr(all_of.latent, name))
    else:
        parts_of_qkv = all_of.qkv_OH.split(rows_by_kind(config))
        assert torch.equal(second.qkv_OH, torch.cat([part.chunk(2)[1] for part in parts_of_qkv]))
    if second.delta is not None and all_of.delta is not None:
        parts_of_kernel = all_of.delta.kernel_CT.split(rows_by_kind(config)[:3])
        assert torch.equal(second.delta.kernel_CT, torch.cat([part.chunk(2)[1] for part in parts_of_kernel]))
    for one, two, both in zip(*(products(layer.mlp) for layer in (first, second, all_of)), strict=True):
        gate_up, down = both
        gate, up = gate_up.chunk(2, dim=-2)
        half = gate.shape[-2] // 2
        assert torch.equal(one[0], torch.cat((gate[..., :half, :], up[..., :half, :]), dim=-2))
        assert torch.equal(torch.cat((one[1], two[1]), dim=-1), down)
    rows = torch.cat((parts[0].head(), parts[1].head()))
    assert torch.equal(rows[: config.vocab_size], whole.head())
    assert not rows[config.vocab_size :].any()


def rows_by_kind(spec: ModelSpec) -> list[int]:
    mixer = spec.layers[0].mixer
    if isinstance(mixer, TargetAttention):
        return [spec.axis_size(axis, 0) for axis in ("q", "kv", "value")]
    kind = mixer.geometry
    keys, heads = kind.num_key_heads * kind.key_dim, kind.num_value_heads
    return [keys, keys, heads * kind.value_dim, heads * kind.value_dim, heads, heads]


def products(mlp: MlpTensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    match mlp:
        case DenseTensors():
            return [(mlp.gate_up_IH, mlp.down_HI)]
        case RoutedTensors():
            return [(mlp.experts.gate_up, mlp.experts.down)]
        case ParallelMlpTensors():
            return [*products(mlp.dense), *products(mlp.routed)]


def test_vocabulary_shards_make_the_whole_embedding_and_head(target: Path) -> None:
    config = read_model(target)
    ids = torch.arange(config.vocab_size)
    hidden = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))

    def work(rank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        sharding = Sharding(config, rank.rank, rank.world_size)
        weights = weights_of(target, rank=rank.rank, ranks=rank.world_size)
        embedding = vocab_embedding(partial(weights.embedding().index_select, 0), sharding, rank)
        head = VocabHead(Linear(weights.head()), config.vocab_size, sharding, rank)
        return embedding(ids), head(hidden), *head.local(hidden)

    rows, logits, _, _ = work(SingleRank())
    pieces = ThreadRanks(4).run(work)
    for got_rows, got_logits, local_logits, first_id in pieces:
        assert torch.equal(got_rows, rows)
        torch.testing.assert_close(got_logits, logits)
        assert torch.equal(local_logits, got_logits[:, first_id : first_id + local_logits.shape[1]])
    assert sum(local.shape[1] for *_, local, _ in pieces) == config.vocab_size


@pytest.mark.parametrize(("world_size", "fitting"), [(3, 2), (5, 4), (64, 4)])
def test_a_size_that_does_not_divide_is_refused_before_loading(
    target: Path, world_size: int, fitting: int
) -> None:
    heads = "(num_attention_heads|linear_num_key_heads) is 4"  # of the first layer
    words = f"tensor_parallel_size={world_size}.*{heads}.*such as {fitting}"
    with pytest.raises(ConfigError, match=words) as caught:
        load_runner(settings(target, tensor_parallel_size=world_size), SingleRank())
    assert caught.value.param == "tensor_parallel_size"


def test_kv_heads_are_repeated_if_there_are_more_ranks(target: Path) -> None:
    config = read_model(target)
    first = next(i for i, layer in enumerate(config.layers) if isinstance(layer.mixer, TargetAttention))
    kv = [Sharding(config, rank, 4).kv_heads(first) for rank in range(4)]
    last = slice(0, 1) if config.attention(first).latent else slice(1, 2)  # latents are one, for all ranks
    assert kv == [slice(0, 1), slice(0, 1), last, last]
    model = Decoder(weights_of(target, rank=3, ranks=4), (), 64, ThreadRank(ThreadRanks(4), 3))
    assert model.new_cache(2, 16).geometries[0].num_kv_heads == 1


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_agree_on_the_smallest_values(world_size: int) -> None:
    device = torch.device("cpu")

    def find(rank: ThreadRank) -> tuple[int, ...]:
        return smallest(lambda: (9 - rank.rank, 5 + rank.rank), 2, rank, device)

    assert ThreadRanks(world_size).run(find) == [(10 - world_size, 5)] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_if_one_rank_has_too_little_memory_all_raise_and_none_waits(world_size: int) -> None:
    def find(rank: ThreadRank) -> str:
        def own() -> tuple[int, int]:
            if rank.rank == 1:
                raise ConfigError("max_model_len=9 needs more", param="max_model_len")
            return 7, 8

        with pytest.raises(ConfigError) as caught:
            smallest(own, 2, rank, torch.device("cpu"))
        return str(caught.value)

    first, second, *others = ThreadRanks(world_size).run(find)
    assert second == "max_model_len=9 needs more"
    assert {first, *others} == {"Another rank of the target cannot be loaded; its error says why."}

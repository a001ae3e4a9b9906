"""Kimi K2 and DeepSeek-V3 as published and as transformers saves them: keys, names, chat."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from manta.actors.chat.chat_model import ChatModel
from manta.actors.targets.model.tensor_parallel import Sharding
from manta.actors.tokenization.chat_template import ChatTemplate
from manta.cluster.errors import PlacementError
from manta.cluster.hardware.gpu_specs import GPUS
from manta.cluster.hardware.layer_shape import DeviceWork
from manta.cluster.hardware.memory_estimate import estimate_memory
from manta.cluster.hardware.model_pair import LayoutDemand
from manta.cluster.hardware.parallel_layouts import ParallelLayout
from manta.cluster.hardware.roofline import GPUS as ROOFLINE
from manta.drafter.compute.layers.linear import RMSNorm
from manta.drafter.compute.layers.mla import MLALayer
from manta.jobs.plan.pair_reader import target_shape
from safetensors.torch import load_file, save_file
from support.checkpoints.byte_tokenizer import byte_tokenizer
from support.checkpoints.families import DEEPSEEK_YARN, FAMILIES
from support.checkpoints.tiny import make_tiny_target
from support.oracles.decoder_requests import computed, load, oracle
from support.paths import DATA, ROOT
from support.published.published import TARGETS, pair_of, published_spec

TEMPLATE = (DATA / "kimi_k2_6.jinja").read_text()  # moonshotai/Kimi-K2.6's, but for pictures
CALL = {
    "id": "functions.now:0",
    "type": "function",
    "function": {"name": "now", "arguments": {"zone": "UTC"}},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "a call", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "functions.now:0", "content": "12:00"},
]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


def test_a_published_kimi_config_has_the_published_values() -> None:
    spec = published_spec("Kimi-K2.6")
    mixer = spec.layers[0].mixer
    assert mixer.latent is not None and mixer.rope is not None
    assert (mixer.num_heads, mixer.head_dim, mixer.value_dim, mixer.q_dim) == (64, 576, 512, 192)
    assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2)
    assert (mixer.rope.kind, mixer.rope.attention_scale, mixer.rope.interleaved) == ("yarn", 1.0, True)
    assert (spec.num_layers, spec.eos_token_ids, spec.dtype) == (61, (163586,), "bfloat16")
    assert [layer.routed is None for layer in spec.layers] == [True] + [False] * 60
    routed = spec.layers[1].routed
    assert routed is not None and routed.shared is not None and routed.shared.inner_size == 2048
    assert (routed.router.groups, routed.router.top_k, routed.router.scale) == (1, 8, 2.827)
    deepseek = published_spec("DeepSeek-V3")
    assert str(deepseek.quantization) == "fp8: FP8 in blocks of 128 x 128"
    router = deepseek.layers[3].routed
    assert router is not None and (router.router.groups, router.router.top_groups) == (8, 4)


def test_eight_ranks_share_heads_and_groups_of_experts_and_repeat_latents() -> None:
    spec = published_spec("Kimi-K2.6")
    last = Sharding(spec, 7, 8)
    assert last.heads(0) == slice(56, 64)
    assert last.slice_of("q", 0) == slice(56 * 192, 64 * 192)
    assert last.slice_of("latent_heads", 0) == slice(56 * 256, 64 * 256)
    assert last.slice_of("attended", 0) == slice(56 * 128, 64 * 128)
    assert last.slice_of("latent_key", 0) is None and last.slice_of("q_rank", 0) is None
    assert last.slice_of("expert_inner", 1) == slice(7 * 256, 8 * 256)
    assert {kind.width for kind in last.kv_geometries()} == {576}


def test_kimi_k2_fits_eight_h200s_packed_and_sixteen_dequantized() -> None:
    """594 GB of weights, and 70,272 bytes of a token on every rank: latents are whole on each."""
    shape = target_shape(published_spec("Kimi-K2.6"))
    assert shape.kv_bytes == shape.rank(8).kv_bytes == 61 * 576 * 2
    demand = LayoutDemand(max_model_len=131072, context=32768)

    def room(name: str, ranks: int, placement: Any) -> Any:
        pair = pair_of(TARGETS[name], published_spec(name))
        assert ranks in pair.tp_sizes
        return estimate_memory(pair, GPUS["h200"], ParallelLayout(ranks, placement, 1), demand)

    packed = room("Kimi-K2.6", 8, "colocated")
    assert packed.weights_bytes / 1e9 == pytest.approx(594 / 8 + 6.6, rel=0.05), "beside the whole drafter"
    assert packed.largest_batch > 8
    assert room("Kimi-K2-Instruct", 16, None).largest_batch > 8
    with pytest.raises(PlacementError, match="To serve it, shard it over 16 GPUs"):
        room("Kimi-K2-Instruct", 8, None)


def test_a_rank_reads_its_attention_once_and_multiplies_absorbed() -> None:
    shape = target_shape(published_spec("Kimi-K2.6"))
    rank = shape.rank(8)
    down = 7168 * (1536 + 576)
    heads = 8 * (1536 * 192 + 512 * 256 + 128 * 7168)
    assert rank.layers[0].dense_params(7168) == down + heads + 3 * 7168 * 18432 // 8
    work = rank.attention(4, 8, 1000)
    assert work.num_bytes == 61 * 4 * 1008 * 1152
    assert work.flop == 61 * 2 * 8 * (576 + 512) * 4 * 8 * 1008


def test_a_plan_expands_prompts_from_the_kernels_number_of_rows() -> None:
    rank = target_shape(published_spec("Kimi-K2.6")).rank(8)
    context = 100_000
    short, long = (rank.prompt_attention(rows, context) for rows in (170, 171))
    verified = rank.attention(1, 170, context)
    assert (short.num_bytes, short.flop) == (verified.num_bytes, verified.flop)
    keys = context + 171
    assert long.flop == 61 * 2 * 8 * (320 * 171 * keys + 256 * 512 * keys)
    assert 0.99 < long.flop / rank.attention(1, 171, context).flop < 1
    zeros = torch.zeros(8, 256, 512, device="meta")
    parts = MLALayer(q_norm=None, q_up=None, kv_norm=RMSNorm(zeros, 1e-6), kv_up_JUC=zeros, v_dim=128)
    assert parts.min_expanded == 171


PREFILL = ROOT / "docs/decisions/expanded-latents.md"


@pytest.mark.parametrize("row", re.findall(r"^\| (\d+)k \| (.*) \|$", PREFILL.read_text(), re.MULTILINE))
def test_the_documented_savings_of_expanded_prompts_are_computed(row: tuple[str, str]) -> None:
    """Chunks have 2048 rows; row i of a chunk sees i + 1 of its keys, half of them on average."""
    rank, device, rows = target_shape(published_spec("Kimi-K2.6")).rank(8), ROOFLINE["NVIDIA H200"], 2048
    rest, absorbed, expanded = 0.0, 0.0, 0.0
    for begin in range(0, prompt := 1024 * int(row[0]), rows):
        count = min(rows, prompt - begin)
        rest += sum(map(device.seconds, (rank.linears(count), rank.experts(count), rank.head(1))))
        work = rank.attention(1, count, begin - count / 2)
        absorbed += device.seconds(work)
        layer = rank.layers[0]
        assert layer.latent is not None
        of_layer = layer.latent.expanded(layer.heads, count * (begin + count / 2), begin + count, 2)
        expanded += device.seconds(DeviceWork(61 * of_layer.num_bytes, 61 * of_layer.flop))
    whole = rest + absorbed
    reported = [float(number) for number in re.findall(r"[\d.]+", row[1])]
    counted = [
        1e3 * whole,
        100 * absorbed / whole,
        1e3 * (rest + expanded),
        100 * (absorbed - expanded) / whole,
    ]
    assert counted == pytest.approx(reported, rel=0.04), counted


def tiny_kimi(folder: Path) -> Path:
    torch.manual_seed(6)
    saved = make_tiny_target(folder / "text", "deepseek_v3", seed=6)
    text = json.loads((saved / "config.json").read_text())
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"pos_emb_height": 2, "pos_emb_width": 2, "pos_emb_time": 1}
    config = transformers.Kimi_K25Config(
        text_config=text,
        vision_config=vision,
        projection_hidden_size=16,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = transformers.Kimi_K25ForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "language_model" in name and (tensor.dim() == 1 or name.endswith("correction_bias")):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder / "kimi")
    return folder / "kimi"


def published(saved: Path, folder: Path) -> Path:
    """Write as on the Hub, by class and names (transformers saves layers as `blocks`, and reads both)."""
    folder.mkdir()
    tensors = load_file(saved / "model.safetensors")
    renamed = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors")
    keys = json.loads((saved / "config.json").read_text())
    keys |= {"architectures": ["KimiK25ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def test_the_text_part_of_a_published_kimi_equals_transformers(tmp_path: Path) -> None:
    saved = tiny_kimi(tmp_path)
    requests = computed(load(published(saved, tmp_path / "hub")))
    for tokens, logits in zip(requests.tokens[:2], requests.logits, strict=False):
        expected, _ = oracle(saved, tokens)
        torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-4)


def test_queries_may_have_no_bottleneck(tmp_path: Path) -> None:
    torch.manual_seed(2)
    changes = {key: value for key, value in FAMILIES["deepseek_v3"].changes.items() if value is not None}
    config = transformers.DeepseekV3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.08,
        tie_word_embeddings=False,
        **{**changes, "q_lora_rank": None, "rope_parameters": dict(DEEPSEEK_YARN)},
    )
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    requests = computed(load(tmp_path))
    expected, _ = oracle(tmp_path, requests.tokens[0])
    torch.testing.assert_close(torch.cat(requests.logits[0]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("thinking", [None, False])
def test_the_template_renders_as_in_transformers_with_and_without_thinking(thinking: bool | None) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {} if thinking is None else {"thinking": thinking}
    ours = ChatTemplate(TEMPLATE, {}).render(MESSAGES, tools=TOOLS, variables=variables)
    theirs, _ = render_jinja_template(
        [MESSAGES], tools=TOOLS, chat_template=TEMPLATE, add_generation_prompt=True, **variables
    )
    assert ours == theirs[0]
    assert ours.endswith("<|im_middle|><think></think>" if thinking is False else "<|im_middle|><think>")
    assert (
        '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"zone": "UTC"}<|tool_call_end|>'
        in ours
    )


def test_reasoning_ends_where_the_prompt_or_the_model_ends_it() -> None:
    model = ChatModel.of(byte_tokenizer(TEMPLATE))
    assert (model.call_parser, model.reasoning_parser) == ("kimi_k2", "kimi_k2")
    template = ChatTemplate(TEMPLATE, {})
    opened = model.reading(template.render(MESSAGES[:1]), {"now": {"type": "object"}})
    closed = model.reading(template.render(MESSAGES[:1], variables={"thinking": False}))
    assert opened.opened and not closed.opened
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}"
    said = "Hm.</think>Now.".replace("Now.", "Now." + call + "<|tool_call_end|><|tool_calls_section_end|>")
    found = opened.parse_complete("r", 0, said)
    assert (found.reasoning, found.content, [c.name for c in found.calls]) == ("Hm.", "Now.", ["now"])

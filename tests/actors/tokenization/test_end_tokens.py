"""Which tokens end an answer: the model's, and the tokenizer's `eos_token`."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from manta import LLM, SamplingParams
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.actors.tokenization.tokenizer_config import TokenIds
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError
from manta.cluster.request.structured_outputs import StructuredOutputsParams
from support.checkpoints.text_pair import VOCAB
from support.checkpoints.tiny import make_tiny_target

PADDED = VOCAB + 16  # rows of the embedding; the tokenizer has VOCAB tokens
END, TURN = 0, 2  # <|endoftext|>, which config.json names, and <|im_end|>


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a padded vocabulary and a tokenizer that ends turns with its own token."""
    made = make_tiny_target(tmp_path_factory.mktemp("padded") / "target", "qwen3", vocab_size=PADDED)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, made / name)
    return write(made, "tokenizer_config", eos_token="<|im_end|>")


@pytest.fixture
def target(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "target"))


def write(folder: Path, name: str, **changes: Any) -> Path:
    file = folder / f"{name}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def settings(target: Path, **more: Any) -> EngineConfig:
    small = {"dtype": "float32", "max_num_seqs": 2, "num_pages": 32, "num_threads": 1}
    return EngineConfig.from_dict({"model": str(target), **small, **more})


@pytest.mark.parametrize(
    ("of_config", "of_generation", "of_tokenizer", "ends"),
    [
        (END, None, "<|im_end|>", (END, TURN)),
        (END, [1, END], "<|im_end|>", (1, END, TURN)),
        (TURN, None, "<|im_end|>", (TURN,)),
        (END, None, None, (END,)),
        (END, None, "<|no token|>", (END,)),
        (None, None, "<|im_end|>", (TURN,)),
        (None, None, None, ()),
        (END, None, {"content": "<|im_end|>", "special": True}, (END, TURN)),
    ],
)
def test_the_tokenizers_end_token_also_ends_an_answer(
    target: Path, of_config: object, of_generation: object, of_tokenizer: object, ends: tuple[int, ...]
) -> None:
    write(target, "config", eos_token_id=of_config)
    write(target, "generation_config", eos_token_id=of_generation)
    write(target, "tokenizer_config", eos_token=of_tokenizer)
    assert resolve_config(settings(target)).target.eos_token_ids == ends
    alone = resolve_config(settings(target, skip_tokenizer_init=True)).target.eos_token_ids
    assert alone == ends[: len(alone)] and set(ends) - {*alone} <= {TURN}


def test_an_end_token_in_the_padding_is_named_and_ends_an_answer(target: Path) -> None:
    write(target, "generation_config", eos_token_id=[END, PADDED - 1])
    (doubt,) = resolve_config(settings(target)).doubts
    assert f"generation_config.json: eos_token_id names {PADDED - 1}, which is no token" in doubt
    schema = StructuredOutputsParams(json={"type": "boolean"})
    with LLM(**asdict(settings(target))) as llm:
        for forced in (END, TURN, PADDED - 1):
            params = SamplingParams(max_tokens=5, temperature=0.0, logit_bias=((forced, 100.0),))
            (output,) = llm.generate("Go", params, use_tqdm=False)
            assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([forced], "stop")
        (held,) = llm.generate("Go", SamplingParams(max_tokens=50, structured_outputs=schema), use_tqdm=False)
        assert held.outputs[0].text in ("true", "false") and held.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("token_id", [PADDED, 10**6, -1])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_an_end_token_that_the_model_cannot_generate_is_refused_by_file_and_key(
    target: Path, name: str, token_id: int
) -> None:
    write(target, "generation_config", eos_token_id=None)
    write(target, name, eos_token_id=[END, token_id])
    with pytest.raises(CheckpointError, match=rf"/{name}\.json: eos_token_id=.* below vocab_size") as caught:
        resolve_config(settings(target))
    assert caught.value.param == "eos_token_id"
    assert END in resolve_config(settings(target, hf_overrides={"eos_token_id": END})).target.eos_token_ids
    with pytest.raises(CheckpointError, match=r"hf_overrides: eos_token_id="):
        resolve_config(settings(target, hf_overrides={"eos_token_id": PADDED}))


def test_ids_in_config_files_equal_the_tokenizers(made: Path, shipped_pair: tuple[Path, Path]) -> None:
    for folder in (made, shipped_pair[0]):
        tokenizer, found = Tokenizer.load(folder), TokenIds.read(folder)
        assert found is not None and found.known == set(range(tokenizer.vocab_size))
        assert tokenizer.ids_in_vocabulary([*found.known, tokenizer.vocab_size]) == tuple(sorted(found.known))

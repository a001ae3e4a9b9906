"""Makes a wider and deeper pair that gives the same answers and drafts as the given one.

It combines real acceptance with the cost of a large model. The added parts cannot affect the output, since
zeros separate them: new hidden dimensions are never written, and the output projections of new heads, new
inner columns and new layers are zero. Other new weights are random, so that kernels do real work.

    hidden  x' = [x, 0], H' wide: sum(x'^2) is unchanged, so with s = sqrt(H / H') and eps' = s^2 eps
            x' / sqrt(sum / H' + eps') = [x / sqrt(sum / H + eps), 0] / s: the norm's weight is multiplied by
            s
    head    its norm also uses the model's eps: rows of q and k are multiplied by s, rounded to a power of two
    heads   query j of K/V head g goes to a new group of queries that begins with g's; see `_places`

Exact in every dtype if s is a power of two (H' = 4 H, 16 H, ..); otherwise norms, which are stored in fp32,
are rounded once more in the dtype of serving. Only the order of summation in products differs. The result
knows nothing more than the given pair and is not for publication. Called by `benchmarks widen`.

Legend: H hidden, I inner, Q query heads, K kv heads, D head dim, m taps; primed: of the wide pair.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from manta.cluster.errors import CheckpointError, ConfigError
from manta.drafter.compute.checkpoint.hf_config import Count, HfConfig, Json, parse, read_json, wrong
from manta.drafter.compute.checkpoint.safetensors_reader import TensorFolder
from safetensors.torch import save_file
from torch import Tensor

_KEYS = {
    "hidden": "hidden_size",
    "inter": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
_NOT_COPIED = ("README.md", "config.json", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Dimensions of a projection, and whether new elements are random or zero.

    `normed`: its outputs (heads) are normalized.
    """

    rows: str
    columns: str
    random: bool
    normed: bool = False


_NORMS = ("input_layernorm", "post_attention_layernorm", "norm", "hidden_norm")
_HEAD_NORMS = ("q_norm", "k_norm")
_MATRICES = {
    "q_proj": _Matrix("queries", "hidden", random=True, normed=True),
    "k_proj": _Matrix("keys", "hidden", random=True, normed=True),
    "v_proj": _Matrix("keys", "hidden", random=True),
    "o_proj": _Matrix("hidden", "queries", random=False),
    "gate_proj": _Matrix("inter", "hidden", random=True),
    "up_proj": _Matrix("inter", "hidden", random=True),
    "down_proj": _Matrix("hidden", "inter", random=False),
    "embed_tokens": _Matrix("vocab", "hidden", random=False),
    "lm_head": _Matrix("vocab", "hidden", random=True),
    "fc": _Matrix("hidden", "taps", random=False),
    "hidden_projection": _Matrix("rank", "hidden", random=True),
    "predecessor_codebook": _Matrix("vocab", "rank", random=True),
    "successor_codebook": _Matrix("vocab", "rank", random=True),
}


@dataclass(frozen=True, slots=True)
class Width:
    """Sizes of a layer: hidden and intermediate size, query heads, K/V heads. The head dim is unchanged."""

    hidden: int
    inter: int
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, config: Json) -> Width:
        return cls(**{field: config[key] for field, key in _KEYS.items()})

    @property
    def group(self) -> int:
        """Return the number of query heads per K/V head."""
        return self.heads // self.kv_heads


def widen_pair(
    target_folder: Path, drafter_folder: Path, output: Path, width: Width, *, layers: int, drafter_layers: int
) -> None:
    """Write the checkpoints `output`/target and `output`/drafter.

    Args:
        target_folder: a Qwen3 target without biases.
        drafter_folder: its drafter in z-lab's format.
        output: a missing or empty folder.
        width: sizes of both, at least the given pair's.
        layers, drafter_layers: layers of target and drafter, at least the given pair's.

    Raises:
        ConfigError: a size is too small, or the output is not empty.
        CheckpointError: the pair is missing, corrupt, or of an unsupported architecture.
    """
    target = _read(target_folder, "Qwen3ForCausalLM", "model")
    drafter = _read(drafter_folder, "DFlashDraftModel", "speculative_config.model")
    wide_target = _wide_config(target, width, layers)
    wide_drafter = {**_wide_config(drafter, width, drafter_layers), "num_target_layers": layers}
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"output={str(output)!r} is not empty. Give a new folder.", param="output")
    _write(target_folder, output / "target", wide_target, _Widening(target, width, "model."))
    _write(drafter_folder, output / "drafter", wide_drafter, _Widening(drafter, width, ""))


@dataclass(frozen=True, slots=True)
class _Axis:
    """A dimension of a tensor with `size` elements; index places[i] has the old element sources[i]."""

    size: int
    places: Tensor
    sources: Tensor

    @classmethod
    def begin(cls, old: int, new: int) -> _Axis:
        """Return an axis that starts with the old elements."""
        return cls(new, torch.arange(old), torch.arange(old))

    def times(self, inner: _Axis, old_inner: int) -> _Axis:
        """Return the product with `inner`, whose old size was `old_inner`."""
        return _Axis(
            self.size * inner.size,
            (self.places[:, None] * inner.size + inner.places).flatten(),
            (self.sources[:, None] * old_inner + inner.sources).flatten(),
        )


class _Widening:
    """Converts the tensors of a model to those of the wide one; `prefix` precedes its layers' names."""

    def __init__(self, config: Json, width: Width, prefix: str) -> None:
        old, dim, taps = Width.of(config), config["head_dim"], config.get("dflash_config", {})
        num_taps = len(taps.get("target_layer_ids", ()))
        self._at = f"{prefix}layers."
        self._num_layers: int = config["num_hidden_layers"]
        self._scale = math.sqrt(old.hidden / width.hidden)
        queries, keys = _places(old, width)
        head, hidden = _Axis.begin(dim, dim), _Axis.begin(old.hidden, width.hidden)
        vocab, rank = (
            _Axis.begin(size, size) for size in (config["vocab_size"], taps.get("selector_rank", 0))
        )
        self._axes = {
            "hidden": hidden,
            "inter": _Axis.begin(old.inter, width.inter),
            "queries": queries.times(head, dim),
            "keys": keys.times(head, dim),
            "vocab": vocab,
            "rank": rank,
            "taps": _Axis.begin(num_taps, num_taps).times(hidden, old.hidden),
        }
        self._random = torch.Generator().manual_seed(0)

    def layer(self, source: TensorFolder, index: int) -> dict[str, Tensor]:
        """Return the tensors of a layer; a new layer is the last one with zero output projections."""
        known = min(index, self._num_layers - 1)
        at, there = f"{self._at}{known}.", f"{self._at}{index}."
        names = [name for name in sorted(source.shapes) if name.startswith(at)]
        found = {name.replace(at, there, 1): self._wide(name, source.get(name)) for name in names}
        if index != known:
            for name in (f"{there}self_attn.o_proj.weight", f"{there}mlp.down_proj.weight"):
                found[name].zero_()
        return found

    def others(self, source: TensorFolder) -> dict[str, Tensor]:
        names = [name for name in sorted(source.shapes) if not name.startswith(self._at)]
        return {name: self._wide(name, source.get(name)) for name in names}

    def _wide(self, name: str, old: Tensor) -> Tensor:
        kind = name.removesuffix(".weight").split(".")[-1]
        if kind in _HEAD_NORMS:
            return old
        if kind in _NORMS:
            return torch.nn.functional.pad(
                old.float(), (0, self._axes["hidden"].size - len(old)), value=1.0
            ).mul_(self._scale)
        if kind not in _MATRICES:
            raise CheckpointError(f"{name}: a model with such a tensor cannot be widened.", param=name)
        matrix = _MATRICES[kind]
        factor = 2.0 ** round(math.log2(self._scale)) if matrix.normed else 1.0
        return self._place(old * factor, self._axes[matrix.rows], self._axes[matrix.columns], matrix.random)

    def _place(self, old: Tensor, rows: _Axis, columns: _Axis, random: bool) -> Tensor:
        shape = (rows.size, columns.size)
        if random:
            wide = torch.randn(shape, generator=self._random, dtype=old.dtype).mul_(columns.size**-0.5)
        else:
            wide = torch.zeros(shape, dtype=old.dtype)
        wide[rows.places[:, None], columns.places] = old[rows.sources[:, None], columns.sources]
        return wide


def _places(old: Width, new: Width) -> tuple[_Axis, _Axis]:
    """Return the new indices of query and K/V heads.

    A new K/V head has new.group queries. An old K/V head with more queries is repeated:

        old  kv 0: q 0 1    kv 1: q 2 3      new group 3:  kv 0: q 0 1 +   kv 1: q 2 3 +   kv 2: q + + +
                                             new group 1:  kv 0: q 0   kv 0: q 1   kv 1: q 2   kv 1: q 3
    """
    copies = -(-old.group // new.group)
    owner, rank = torch.arange(old.heads) // old.group, torch.arange(old.heads) % old.group
    places = (owner * copies + rank // new.group) * new.group + rank % new.group
    keys = torch.arange(old.kv_heads * copies)
    return _Axis(new.heads, places, torch.arange(old.heads)), _Axis(new.kv_heads, keys, keys // copies)


class _Needed(HfConfig):
    """Fields of config.json that are needed here."""

    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    num_hidden_layers: Count
    head_dim: Count
    vocab_size: Count
    rms_norm_eps: float


def _read(folder: Path, architecture: str, param: str) -> Json:
    config, file = read_json(folder, param=param), str(folder / "config.json")
    if config.get("architectures") != [architecture]:
        wanted = f"[{architecture!r}]: others cannot be widened"
        raise wrong(file, "architectures", config.get("architectures"), wanted)
    parse(_Needed, config, file)
    return config


def _wide_config(config: Json, width: Width, layers: int) -> Json:
    """Return the configuration of the wide model; raises ConfigError if a size is too small."""
    old, before = Width.of(config), config["num_hidden_layers"]
    sizes = [(field.name, getattr(old, field.name), getattr(width, field.name)) for field in fields(Width)]
    for name, minimum, wanted in [*sizes, ("layers", before, layers)]:
        if wanted < minimum:
            raise ConfigError(f"{name}={wanted} must be at least {minimum}, as in the pair.", param=name)
    if width.heads % width.kv_heads:
        raise ConfigError(f"kv_heads={width.kv_heads} must divide heads={width.heads}.", param="kv_heads")
    needed = old.kv_heads * -(-old.group // width.group)
    if width.kv_heads < needed:
        raise ConfigError(
            f"kv_heads={width.kv_heads} must be at least {needed}: {old.group} queries share a K/V head of "
            f"the pair, {width.group} would here.",
            param="kv_heads",
        )
    kinds = config.get("layer_types") or ["full_attention"] * before
    return {
        **config,
        **{key: getattr(width, field) for field, key in _KEYS.items()},
        "num_hidden_layers": layers,
        "layer_types": [*kinds, *["full_attention"] * (layers - before)],
        "rms_norm_eps": config["rms_norm_eps"] * old.hidden / width.hidden,
    }


def _write(source_folder: Path, folder: Path, config: Json, widening: _Widening) -> None:
    """Write one file per layer, so that only one layer is in memory."""
    source = TensorFolder(source_folder)
    folder.mkdir(parents=True)
    for file in source_folder.iterdir():
        if file.is_file() and file.name not in _NOT_COPIED and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    shards = [
        widening.others,
        *(partial(widening.layer, index=i) for i in range(config["num_hidden_layers"])),
    ]
    files: dict[str, str] = {}
    num_bytes = 0
    for i, shard in enumerate(shards):
        tensors, name = shard(source), f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config)


def _write_json(file: Path, value: Json) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")

"""A target's tensors, by the slices that one rank needs; nothing else of the files is read.

Shapes are checked against config.json from the files' headers before any weight is read. Called by
`loading/rank.py`; consumed layer by layer by `decoder.py`, so that plain weights are gone once a layer is
packed.

Legend: H hidden, O outputs of a rank, I inner size of a rank, D head dim, U vocabulary rows of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ....cluster.errors import CheckpointError
from ....drafter.compute.tensors import TensorFolder
from .config import TargetConfig
from .parallel import Sharding


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Query, key and value rows stand in this order; gate rows before up rows.

    Biases and head norms are None where the family has none; biases of o and down are None but on rank 0.
    """

    input_norm_H: Tensor
    post_norm_H: Tensor
    qkv_OH: Tensor
    qkv_bias_O: Tensor | None
    o_HO: Tensor
    o_bias_H: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    gate_up_IH: Tensor
    gate_up_bias_I: Tensor | None
    down_HI: Tensor
    down_bias_H: Tensor | None


class TensorSource(Protocol):
    """Tensors by their names in a checkpoint: a `TensorFolder`, or something that makes them up."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def get(self, name: str) -> Tensor: ...

    def slice(self, name: str, rows: slice, dim: int = 0) -> Tensor:
        """Part of a matrix or vector along `dim`."""
        ...


class TargetWeights:
    """A rank's view of a checkpoint.

    Args:
        source: a folder, whose files are opened and checked, or the tensors of `target_shapes` themselves.
        sharding: which slices are this rank's.
    """

    def __init__(
        self,
        source: Path | TensorSource,
        config: TargetConfig,
        sharding: Sharding,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.sharding = config, sharding
        self._dtype, self._device = dtype, device
        self._tensors = open_checkpoint(source, config) if isinstance(source, Path) else source

    def layer(self, index: int) -> LayerWeights:
        """Read one block."""
        c, s, at = self.config, self.sharding, f"model.layers.{index}."
        q, kv = _scaled(s.heads, c.head_dim), _scaled(s.kv_heads, c.head_dim)
        qkv = {"q": q, "k": kv, "v": kv}
        inner = {"gate": s.inner, "up": s.inner}
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        return LayerWeights(
            input_norm_H=self._get(f"{at}input_layernorm.weight"),
            post_norm_H=self._get(f"{at}post_attention_layernorm.weight"),
            qkv_OH=self._stacked(attention, qkv, "weight"),
            qkv_bias_O=self._stacked(attention, qkv, "bias") if c.attention_bias else None,
            o_HO=self._get(f"{attention}o_proj.weight", q, dim=1),
            o_bias_H=self._first_rank(f"{attention}o_proj.bias") if c.attention_bias else None,
            q_norm_D=self._get(f"{attention}q_norm.weight") if c.family.qk_norm else None,
            k_norm_D=self._get(f"{attention}k_norm.weight") if c.family.qk_norm else None,
            gate_up_IH=self._stacked(mlp, inner, "weight"),
            gate_up_bias_I=self._stacked(mlp, inner, "bias") if c.mlp_bias else None,
            down_HI=self._get(f"{mlp}down_proj.weight", s.inner, dim=1),
            down_bias_H=self._first_rank(f"{mlp}down_proj.bias") if c.mlp_bias else None,
        )

    def final_norm(self) -> Tensor:
        return self._get("model.norm.weight")

    def embedding(self) -> Tensor:
        """[U, H]; token ids beyond the vocabulary are zero rows."""
        return self._vocab("model.embed_tokens.weight")

    def head(self) -> Tensor:
        """[U, H]; the embedding where they are tied."""
        return self.embedding() if self.config.tied_head else self._vocab("lm_head.weight")

    def _vocab(self, name: str) -> Tensor:
        s = self.sharding
        rows_UH = self._get(name, s.vocab)
        missing = s.vocab_rows - len(rows_UH)
        return torch.nn.functional.pad(rows_UH, (0, 0, 0, missing)) if missing else rows_UH

    def _stacked(self, at: str, parts: dict[str, slice], kind: str) -> Tensor:
        return torch.cat([self._get(f"{at}{name}_proj.{kind}", rows) for name, rows in parts.items()])

    def _first_rank(self, name: str) -> Tensor | None:
        return self._get(name) if self.sharding.rank == 0 else None

    def _get(self, name: str, part: slice | None = None, dim: int = 0) -> Tensor:
        if part is None or self._tensors.shapes[name][dim] == part.stop - part.start:
            tensor = self._tensors.get(name)
        else:
            tensor = self._tensors.slice(name, part, dim)
        return tensor.to(device=self._device, dtype=self._dtype)


def open_checkpoint(folder: Path, config: TargetConfig) -> TensorFolder:
    """Open the files and check that every tensor is there in its shape, without reading one."""
    tensors = TensorFolder(folder)
    for name, shape in target_shapes(config).items():
        tensors.check(name, shape)
    if not config.attention_bias and "model.layers.0.self_attn.q_proj.bias" in tensors.shapes:
        raise CheckpointError(
            f"model: {folder} holds attention biases, but config.json says attention_bias=false.",
            param="model",
        )
    return tensors


def target_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a target must have."""
    c = config
    hidden, inner = c.hidden_size, c.intermediate_size
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = {"q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden), "o": (hidden, q_size)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not c.tied_head:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
        shapes |= _projections(f"{at}self_attn.", attention, c.attention_bias)
        shapes |= _projections(f"{at}mlp.", mlp, c.mlp_bias)
        if c.family.qk_norm:
            shapes |= {f"{at}self_attn.{kind}_norm.weight": (c.head_dim,) for kind in "qk"}
    return shapes


def _projections(at: str, shapes: dict[str, tuple[int, int]], bias: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {f"{at}{name}_proj.weight": shape for name, shape in shapes.items()}
    if bias:
        found |= {f"{at}{name}_proj.bias": shape[:1] for name, shape in shapes.items()}
    return found


def _scaled(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)

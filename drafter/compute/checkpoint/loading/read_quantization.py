"""Reads the quantization that a checkpoint declares; an unsupported method is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from .....cluster.errors import CheckpointError
from ..gguf.gguf_folder import read_gguf
from ..hf_config import Json, read_json, wrong
from ..quantization.auto_round import read_auto_round
from ..quantization.awq import read_awq
from ..quantization.checkpoint_quantization import KEY, CheckpointQuantization
from ..quantization.compressed_tensors import read_compressed_tensors
from ..quantization.eight_bit import read_fp8
from ..quantization.gptq import read_gptq
from ..quantization.modelopt import HF_QUANT_CONFIG, read_modelopt


def _read_mxfp4(_: Json, file: str) -> CheckpointQuantization:
    """Return the quantization of gpt-oss; names of tensors say which ones are packed."""
    return CheckpointQuantization(method="mxfp4", file=file, packed_experts="mxfp4")


_READERS: Mapping[str, Callable[[Json, str], CheckpointQuantization]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "auto_round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "mxfp4": _read_mxfp4,
    "gguf": read_gguf,
}
_NAMED = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "auto-round", "modelopt", "mxfp4", "gguf")


def read_quantization(raw: Json, folder: Path, *, param: str) -> CheckpointQuantization | None:
    """Return the declared quantization, None for plain weights; `raw` is config.json with overrides."""
    stated, file = raw.get(KEY), str(folder / "config.json")
    of_file = _read_hf_quant_config(folder, param)
    if not stated:
        return of_file
    method = stated.get("quant_method") if isinstance(stated, Mapping) else stated
    if isinstance(stated, Mapping) and method is None and "quant_algo" in stated:
        method = "modelopt"  # whose first versions did not name it
    if not isinstance(stated, Mapping) or not isinstance(method, str) or method not in _READERS:
        wanted = f"one of {', '.join(_NAMED)}: others are not served, use the unquantized checkpoint"
        raise wrong(file, f"{KEY}.quant_method", method, wanted)
    found = _READERS[method](stated, file)
    if of_file is not None and (found.method, found.targets) != (of_file.method, of_file.targets):
        raise CheckpointError(
            f"{file}: {KEY} says {found}, but {HF_QUANT_CONFIG} says {of_file}. Take both from one revision.",
            param=KEY,
        )
    return found


def _read_hf_quant_config(folder: Path, param: str) -> CheckpointQuantization | None:
    stated = read_json(folder, HF_QUANT_CONFIG, param=param, required=False).get("quantization")
    if not isinstance(stated, Mapping) or stated.get("quant_algo") is None:
        return None
    return read_modelopt(stated, str(folder / HF_QUANT_CONFIG), "quantization")

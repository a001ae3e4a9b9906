"""AutoRound's `quantization_config`: integers in GPTQ's or AWQ's packing, with exceptions by module.

Of GPTQ's packings "auto_round:auto_gptq" stores zeros less one, "auto_round" and "auto_round:gptqmodel" as
they are. compressed-tensors' layouts and floating-point types are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from ..hf_config import HfConfig, Json, parse, wrong
from .awq import AWQ
from .checkpoint_quantization import KEY, CheckpointQuantization
from .gptq import GPTQ
from .module_patterns import LINEAR, ModulePatterns, expressions_of, normalized
from .packed_integers import PackedIntegers
from .scheme import WHOLE_ROW, GroupSize, Scheme

_PLAIN_BITS = 16
_SERVED_BITS = (2, 3, 4, 8)
_ZERO_OFFSETS: Mapping[str, Literal[0, 1]] = {
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round:gptqmodel": 0,
    "auto_round": 0,
}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")


class AutoRoundConfig(HfConfig):
    quant_method: Literal["auto-round", "auto_round", "intel/auto-round"]
    bits: int
    group_size: GroupSize
    data_type: Literal["int"] = Field("int", description="'int': other types are not served")
    packing_format: str = "auto_round:auto_gptq"
    extra_config: dict[str, Any] = Field({}, description="an object by module")  # Any: JSON values
    act_bits: int | None = None


class _ModuleSettings(HfConfig):
    bits: int | None = None
    group_size: GroupSize | None = None
    data_type: str = "int"  # modules of 16 bits have "fp" or "float"


def read_auto_round(raw: Json, file: str) -> CheckpointQuantization:
    config = parse(AutoRoundConfig, raw, file, KEY)
    targets: list[tuple[ModulePatterns, Scheme | None]] = []
    for module, changes in config.extra_config.items():
        at = f"{KEY}.extra_config.{module}"
        own = parse(_ModuleSettings, changes, file, at) if isinstance(changes, Mapping) else _ModuleSettings()
        patterns = expressions_of("search", [module], file, at)
        targets.append(
            (ModulePatterns(frozenset({normalized(module)}), patterns), _scheme(config, own, file, at))
        )
    return CheckpointQuantization(
        method="auto-round",
        file=file,
        targets=(*targets, (LINEAR, _scheme(config, _ModuleSettings(), file, KEY))),
        quantizes_activations=(config.act_bits or _PLAIN_BITS) < _PLAIN_BITS,
    )


def _scheme(config: AutoRoundConfig, own: _ModuleSettings, file: str, at: str) -> Scheme | None:
    """Return a module's scheme, or None if it is not quantized; its own settings take precedence."""
    bits, group = own.bits or config.bits, own.group_size or config.group_size
    if bits >= _PLAIN_BITS:
        return None
    if own.data_type != "int":
        raise wrong(file, f"{at}.data_type", own.data_type, "'int': other types are not served")
    groups = None if group == WHOLE_ROW else group
    if config.packing_format in _AWQ:
        if bits != 4:
            raise wrong(file, f"{at}.bits", bits, "4, for AWQ's packing")
        return PackedIntegers(AWQ, 4, groups)
    if config.packing_format not in _ZERO_OFFSETS:
        served = ", ".join((*_ZERO_OFFSETS, *_AWQ))
        raise wrong(
            file, f"{KEY}.packing_format", config.packing_format, f"one of {served}: others are not served"
        )
    for served in _SERVED_BITS:
        if bits == served:
            return PackedIntegers(GPTQ, served, groups, zero_offset=_ZERO_OFFSETS[config.packing_format])
    raise wrong(file, f"{at}.bits", bits, "2, 3, 4 or 8, or 16 for modules that are not quantized")

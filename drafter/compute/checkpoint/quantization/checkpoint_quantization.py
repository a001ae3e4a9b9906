"""The quantization that a config.json declares: the scheme in which each module is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..quantized_matrix import PackedForm
from .module_patterns import NO_MODULES, ModulePatterns
from .scheme import Scheme

KEY = "quantization_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuantization:
    """The quantization that config.json, or ModelOpt's hf_quant_config.json, declares.

    Attributes:
        file: where it was read, for messages.
        ignored: modules that are not quantized, regardless of the targets.
        targets: schemes of modules (None: not quantized); whole names first, then the first matching pattern.
        quantizes_activations: whether the publisher's engine rounds activations, which this one does not.
        quantizes_kv_cache: whether the publisher's engine stores K and V in 8 bits or fewer.
        has_fp8_kv_scales: whether stored scales of K and V, if any, are for FP8 (`kv_scales.py`).
        packed_experts: form of all routed experts, stored without modules of their own.
        gguf_files: parts of the GGUF file that holds the tensors, in place of safetensors.
    """

    method: str
    file: str
    ignored: ModulePatterns = NO_MODULES
    targets: tuple[tuple[ModulePatterns, Scheme | None], ...] = ()
    quantizes_activations: bool = False
    quantizes_kv_cache: bool = False
    has_fp8_kv_scales: bool = True
    packed_experts: Literal["mxfp4"] | None = None
    gguf_files: tuple[str, ...] = ()

    def __str__(self) -> str:
        schemes = dict.fromkeys(str(scheme) for _, scheme in self.targets if scheme is not None)
        found = [*schemes, *(["MXFP4 experts"] if self.packed_experts else [])]
        return f"{self.method}: {', '.join(found)}" if found else self.method

    def packed_form(self, module: str) -> PackedForm | None:
        """Return the form of a module's weight where products take codes; None if it is dequantized."""
        scheme = self.scheme_of(module)
        return None if scheme is None else scheme.packed_form

    def scheme_of(self, module: str) -> Scheme | None:
        if self.ignored.matches(module):
            return None
        for patterns, scheme in self.targets:
            if patterns.has_name(module):
                return scheme
        return next((scheme for patterns, scheme in self.targets if patterns.matches(module)), None)

"""What config.json says of a checkpoint's quantized matrices: which module is stored in which scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .module_patterns import NO_MODULES, ModulePattern, ModulePatterns
from .scheme import Scheme

KEY = "quantization_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuantization:
    """The quantization that config.json, or ModelOpt's hf_quant_config.json, declares.

    Attributes:
        method: `quant_method`.
        file: where it was read, for messages.
        ignored: modules that are not quantized, whatever the targets say.
        targets: schemes of modules; whole names take precedence over patterns, then the first match. None is
            a module that is not quantized.
        quantizes_activations: whether the publisher's engine rounds activations, which this one does not.
        quantizes_kv_cache: whether the publisher's engine stores K and V in 8 bits or fewer.
        packed_experts: form of all routed experts, stored without modules of their own.
        packed: modules whose tensors are read as they are stored.
    """

    method: str
    file: str
    ignored: ModulePatterns = NO_MODULES
    targets: tuple[tuple[ModulePatterns, Scheme | None], ...] = ()
    quantizes_activations: bool = False
    quantizes_kv_cache: bool = False
    packed_experts: Literal["mxfp4"] | None = None
    packed: tuple[ModulePattern, ...] = ()

    def __str__(self) -> str:
        schemes = dict.fromkeys(str(scheme) for _, scheme in self.targets if scheme is not None)
        found = [*schemes, *(["MXFP4 experts"] if self.packed_experts else [])]
        return f"{self.method}: {', '.join(found)}" if found else self.method

    def is_packed(self, module: str) -> bool:
        return any(pattern.matches(module) for pattern in self.packed)

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module; None if it is not quantized."""
        if self.ignored.matches(module):
            return None
        for patterns, scheme in self.targets:
            if patterns.has_name(module):
                return scheme
        return next((scheme for patterns, scheme in self.targets if patterns.matches(module)), None)

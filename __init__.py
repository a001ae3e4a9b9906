"""Manta: a Ray-native inference cluster for DFlash block-diffusion speculative decoding.

The face of the package: `LLM` (offline generation without Ray) and its parameters. Importing it is
cheap; torch is loaded when `LLM` is first touched.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cluster.request.request import SamplingParams
from .cluster.request.structured_outputs import StructuredOutputsParams
from .version import __version__

if TYPE_CHECKING:
    from .actors.llm import LLM

__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:  # Any: the module protocol (PEP 562) leaves the type open.
    if name == "LLM":
        return import_module(".actors.llm", __name__).LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

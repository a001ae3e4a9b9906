"""Opens a GGUF file as the tensors of a Hugging Face checkpoint; config.json names its files.

    "quantization_config": {"quant_method": "gguf", "files": ["/models/a-00001-of-00002.gguf", ...]}

The folder holds config.json and the tokenizer alone. The file decides what is packed: each matrix has the
scheme of its type.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Literal

from gguf.constants import GGMLQuantizationType
from torch import Tensor

from .....cluster.errors import CheckpointError, brief_name
from ..hf_config import HfConfig, Json, parse
from ..quantization.checkpoint_quantization import KEY, CheckpointQuantization
from ..quantization.module_patterns import ModulePatterns
from ..safetensors_reader import TensorFolder, TensorHeaders
from .architectures import views_of
from .block_formats import FLOATS, is_read
from .block_scheme import BlockScheme
from .gguf_file import GgufFile
from .split_files import METHOD
from .tensor_views import INTEGERS

_WEIGHT = ".weight"


def _is_packed_experts(name: str) -> bool:
    return name.endswith("_blocks")  # gpt-oss's, which have no modules of their own


class GgufConfig(HfConfig):
    quant_method: Literal["gguf"]
    files: tuple[str, ...]


class GgufFolder(TensorFolder):
    """The tensors of a GGUF file under Hugging Face's names; packed rows are bytes."""

    def __init__(self, folder: str | Path, file: GgufFile) -> None:
        """Raises CheckpointError for an architecture, tensor or type that is not supported."""
        TensorHeaders.__init__(self, str(file.path))
        self.folder, self._file = Path(folder), file
        for info in file.tensors.values():
            if not is_read(info.type) and info.type not in INTEGERS:
                raise CheckpointError(
                    f"{file.path} stores {brief_name(info.name)} as {info.type.name}, which is not supported."
                    " Take another quantization of this model."
                )
        self._views = views_of(file)
        for name, view in self._views.items():
            self.add(name, view.shape, view.dtype, file.path.name)

    def get(self, name: str) -> Tensor:
        return self.part(name)

    def part(self, name: str, *ranges: slice) -> Tensor:
        return self._views[name].read(self._file, ranges)


def open_gguf_folder(folder: str | Path, files: tuple[str, ...]) -> GgufFolder:
    return GgufFolder(folder, GgufFile(files[0]))


def read_gguf(raw: Json, file: str) -> CheckpointQuantization:
    """Return the types of the matrices in the files that `raw` names."""
    files = parse(GgufConfig, raw, file, KEY).files
    if not files:
        raise CheckpointError(f"{file}: {KEY}.files is empty; it must name a GGUF file.", param=KEY)
    modules: defaultdict[GGMLQuantizationType, set[str]] = defaultdict(set)
    tensors = open_gguf_folder(Path(file).parent, files)
    for name, dtype in tensors.dtypes.items():
        kind = GGMLQuantizationType.__members__.get(dtype)
        if kind is not None and kind not in FLOATS and name.endswith(_WEIGHT):
            modules[kind].add(name.removesuffix(_WEIGHT))
    return CheckpointQuantization(
        method=METHOD,
        file=file,
        targets=tuple(
            (ModulePatterns(frozenset(names)), BlockScheme(kind)) for kind, names in sorted(modules.items())
        ),
        packed_experts="mxfp4" if any(map(_is_packed_experts, tensors.shapes)) else None,
        gguf_files=files,
    )

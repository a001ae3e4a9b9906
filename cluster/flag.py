"""The declaration of a dataclass field's command-line flag: a `Flag` in the field's type annotation.

`Annotated[int, Flag("-n")]` declares an option next to its name, type, default and description.
`jobs/common/engine_flags.py` makes typer options of the fields; its module docstring follows an option from
the terminal to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class Flag:
    """Properties of a field's flag beyond the field's name, type and default.

    Attributes:
        names: all spellings, separated by spaces; if all are short ("-m"), `--field-name` is added.
        metavar: name of the value in `--help`.
        parser: converts the text to the value. The message of its ValueError is a usage error.
        least, most: bounds of a number.
        positional: the value is an argument without a flag.
        absent: the field can only be set in Python or YAML.
    """

    names: str = ""
    metavar: str | None = None
    parser: Callable[[str], Any] | None = None  # Any: the field's type
    least: float | None = None
    most: float | None = None
    positional: bool = False
    absent: bool = False


def parse_size(text: str) -> int:
    """Parse an integer with an optional k, m, g (powers of 1000) or K, M, G (powers of 1024): 32k, 1.5G."""
    text = text.strip()
    factor = _SIZES.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * factor) if factor > 1 else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number; write 4096, 32k or 1G.") from None


def absolute_path(text: str) -> str:
    """Return the absolute path of a file or folder, for other processes; a URL is unchanged."""
    return text if "://" in text else str(Path(text).absolute())


def folder_or(*words: str) -> Flag:
    """Return the flag of a folder that a word, or an empty text, may replace."""
    metavar = "|".join(("FOLDER", *words))
    return Flag(metavar=metavar, parser=lambda text: text if text in ("", *words) else absolute_path(text))


NO_FLAG = Flag(absent=True)
Size = Annotated[int, Flag(metavar="SIZE", parser=parse_size)]
FilePath = Annotated[str, Flag(metavar="FILE", parser=absolute_path)]
FolderPath = Annotated[str, Flag(metavar="FOLDER", parser=absolute_path)]

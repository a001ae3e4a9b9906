"""An object with an effect when it is unpickled, which untrusted bytes must never be."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TouchesWhenUnpickled:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:  # Any: pickle's own
        return (Path.touch, (self.path,))

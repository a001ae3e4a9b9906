"""Training text: the source files of the running interpreter's standard library (PSF license).

Selects the files and the held-out ones. The split is a hash of the relative path, the same on every machine.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Tests and vendored code are excluded, and packages that are large and uniform.
_NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_OF_ONE_KIND = {
    "idlelib",
    "lib2to3",
    "distutils",
    "turtledemo",
    "tkinter",
    "msilib",
    "ensurepip",
    "__phello__",
}
_EXCLUDED_FOLDERS = frozenset(_NOT_THE_LIBRARY | _OF_ONE_KIND)
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")
_KEPT_CHARMAPS = ("cp1252.py", "iso8859_15.py")
_HELD_OUT_BUCKETS = 12


@dataclass(frozen=True)
class CorpusFile:
    """A file of the library; `path` is relative, with forward slashes."""

    path: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.path)


def is_held_out(path: str) -> bool:
    """Return whether a file is never trained on; about one in twelve is."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % _HELD_OUT_BUCKETS == 0


def library_files(root: Path | None = None) -> list[CorpusFile]:
    """Return all files of the corpus, including held-out ones, in a stable order."""
    root = root or Path(sysconfig.get_path("stdlib"))
    return list(_read_files(root))


def _read_files(root: Path) -> Iterator[CorpusFile]:
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if not _belongs(path):
            continue
        text = file.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= 200:
            yield CorpusFile(path, text)


def _belongs(path: str) -> bool:
    *folders, name = path.split("/")
    if _EXCLUDED_FOLDERS.intersection(folders) or name.startswith(_EXCLUDED_PREFIXES):
        return False
    if any(folder.startswith(_EXCLUDED_PREFIXES) for folder in folders):
        return False
    if folders == ["encodings"] and name.startswith(
        ("cp", "mac_", "iso", "koi8", "kz", "ptcp", "tis", "hp_")
    ):
        return name in _KEPT_CHARMAPS
    return True

"""Files that were changed since the branch left the main line, by git."""

from __future__ import annotations

import os
import subprocess
from functools import cache

from support.paths import ROOT


def merge_base() -> str:
    """Return the commit to compare with: $MANTA_BASE, or where the branch left its upstream, or HEAD."""
    if base := os.environ.get("MANTA_BASE"):
        return base
    for upstream in ("@{upstream}", "origin/HEAD", "origin/main"):
        if base := _git("merge-base", "HEAD", upstream):
            return base[0]
    return "HEAD"


@cache
def changed_files(base: str | None = None) -> frozenset[str]:
    """Return files that differ from a commit (default: `merge_base()`) or are new; none without git."""
    changed = _git("diff", "--name-only", base or merge_base())
    return frozenset([*changed, *_git("ls-files", "--others", "--exclude-standard")])


def _git(*arguments: str) -> list[str]:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []

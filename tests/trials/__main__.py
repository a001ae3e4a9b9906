"""`python tests/trials NAME ...`: see `__init__.py`."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).resolve().parent.parent
    sys.path[:1] = [str(tests)]  # instead of this folder
    names = sorted(path.stem for path in tests.glob("trials/[!_]*.py") if "__main__" in path.read_text())
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        raise SystemExit(f"python tests/trials NAME ...: NAME is one of {', '.join(names)}")
    runpy.run_module(f"trials.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)

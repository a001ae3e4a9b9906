"""`python tests/trials NAME ...`: see `__init__.py`."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).resolve().parent.parent
    sys.path[:1] = [str(tests)]  # instead of this folder
    modules = {
        path.stem: ".".join(path.relative_to(tests).with_suffix("").parts)
        for path in sorted(tests.glob("trials/**/[!_]*.py"))
        if "__main__" in path.read_text()
    }
    if len(sys.argv) < 2 or sys.argv[1] not in modules:
        raise SystemExit(f"python tests/trials NAME ...: NAME is one of {', '.join(sorted(modules))}")
    runpy.run_module(modules[sys.argv.pop(1)], run_name="__main__", alter_sys=True)

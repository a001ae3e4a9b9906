"""`python tests/benchmarks NAME ...`: see `cli.py`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this folder first, whose files shadow other modules; the package is in the parent folder.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from benchmarks.cli import main

    main()

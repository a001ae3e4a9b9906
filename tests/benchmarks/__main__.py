"""`python tests/benchmarks NAME ...`: see `cli.py`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python put this folder first, whose files are named like other modules; the package is in the one above.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from benchmarks.cli import main

    main()

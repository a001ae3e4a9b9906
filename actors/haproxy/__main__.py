"""`python -m manta.actors.haproxy` is `manta-haproxy`."""

import sys

from .supervisor import main

sys.exit(main())

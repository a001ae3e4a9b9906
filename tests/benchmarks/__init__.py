"""Benchmarks of Manta against itself and other systems, for its developers; not in the wheel.

    python tests/benchmarks NAME ...

`cli.py` has the commands. `manta bench` (`jobs/bench/`) is for users' own models; shared parts are there.
"""

import sys

import ray.cloudpickle

# Ray's workers cannot import this package, so its code is sent by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

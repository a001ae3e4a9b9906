"""Benchmarks of Manta against itself and against others, for its developers. They are not in the wheel.

    python tests/benchmarks NAME ...

`cli.py` has the commands. What users measure on models of their own is `manta bench` (`jobs/bench/`); the
parts that both share are there.
"""

import sys

import ray.cloudpickle

# Ray's workers cannot import this package: what they run of it is sent with its code.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

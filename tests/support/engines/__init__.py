"""Executors, devices, ranks and workloads that drive the engine core in tests."""

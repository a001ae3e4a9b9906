"""Load for benchmarks: requests (asks.py), arrival times (arrivals.py), latencies (latencies.py)."""

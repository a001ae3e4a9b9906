"""Load for benchmarks: requests (request_source.py), published prompts, and Pareto curves."""

"""Parts that all benchmarks share: options, provenance, idle checks."""

"""What all benchmarks share: options, provenance, idle checks."""

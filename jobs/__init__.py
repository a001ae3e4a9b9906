"""Programs with a start and an end: the command line, serving, batch jobs, benchmarks, training."""

"""The host: files, control groups, threads, logging."""

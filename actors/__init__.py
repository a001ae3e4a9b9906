"""Lives: what exists as a process. Ray stands in thin shells around plain classes."""

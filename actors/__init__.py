"""Everything that runs as a process. Ray code is a thin layer around plain classes."""

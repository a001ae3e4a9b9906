"""Published checkpoints by their config files, and the tables in docs/families.md."""

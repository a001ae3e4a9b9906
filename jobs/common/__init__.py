"""What several commands share: flags, configuration, tables, progress."""

"""Parts that several commands share: flags, configuration, tables, progress."""

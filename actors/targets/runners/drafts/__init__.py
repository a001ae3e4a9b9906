"""Sources of drafts on host and device: one class per method behind the same verbs."""

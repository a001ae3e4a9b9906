"""What drafts for a target, on host and device: one class per method behind the same verbs."""

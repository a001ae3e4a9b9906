"""The method: a small model that drafts a whole block from the target's hidden states."""

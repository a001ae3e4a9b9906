"""The target: what checkpoints mean, the model, loading, and how a rank steps."""

"""The target: checkpoint families, the model, loading, and the runners that execute a rank's steps."""

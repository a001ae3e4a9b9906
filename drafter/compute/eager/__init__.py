"""PyTorch: the meaning of every operator."""

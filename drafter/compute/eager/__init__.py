"""PyTorch: the definition of every operator. Start with `backend.py`."""

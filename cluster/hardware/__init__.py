"""What GPUs and models are, as numbers: shapes, memory, rooflines, step times. Start with `roofline.py`."""

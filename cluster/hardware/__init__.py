"""GPUs and models as numbers: shapes, memory, rooflines, step times. Start with `roofline.py`."""

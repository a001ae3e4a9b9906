"""Every order in which threads, GPUs and streams can run recorded operations; first read `machine.py`."""

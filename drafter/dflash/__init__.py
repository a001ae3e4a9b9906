"""DFlash (arXiv 2602.06036) drafts a whole block from the target's states. Start with `model.py`."""

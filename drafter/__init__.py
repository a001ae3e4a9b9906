"""Guesses and judges: the DFlash method on torch. Neither Ray nor torch.distributed."""

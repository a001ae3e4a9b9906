"""Launches of the GPU's kernels at the shapes of served models, recorded without a GPU."""

"""The thread team of the fused CPU pass."""

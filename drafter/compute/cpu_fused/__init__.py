"""A bf16 pass in one compiled call, on CPUs. Read `fused_forward.py` first."""

"""What fits a node's GPUs, and how fast it would be: the arithmetic behind `manta plan`.

    Gpu, Pair ─▶ layouts.py: which there are ─▶ room.py: what fits ─▶ step_time.py: seconds of a round
             ─▶ estimates.py: tokens/s at a batch ─▶ (playing.py: a trace through the simulator) ─▶ choice.py

Shapes and rates in, values out; nothing is read or measured here. Called by `jobs/plan/`.
"""

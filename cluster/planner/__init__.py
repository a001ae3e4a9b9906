"""Estimates which layouts of a model pair fit a node's GPUs and how fast each would be (`manta plan`).

    Gpu, Pair ─▶ layouts.py: candidate layouts ─▶ room.py: memory ─▶ step_time.py: seconds per round
             ─▶ estimates.py: tokens/s at a batch size ─▶ (playing.py: simulate a trace) ─▶ choice.py

Pure arithmetic on shapes and rates: nothing here reads a checkpoint or measures. Called by `jobs/plan/`.
"""

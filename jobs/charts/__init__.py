"""Charts: plots with matplotlib (`plots.py`)."""

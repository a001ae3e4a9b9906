"""What tests share, by group; `paths.py` has the folders of this repository."""

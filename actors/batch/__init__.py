"""Rows of datasets as they are read, answered and kept; what every door to batch work shares."""

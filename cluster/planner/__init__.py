"""Estimates the speed of layouts that fit a node, from shapes and rates alone, and chooses one."""

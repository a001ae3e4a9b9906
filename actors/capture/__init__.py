"""Captured traffic, and the target's recorded outputs, stored to train drafters. Off by default."""

"""Manta's version. It is part of the key under which measurements are stored between starts."""

__version__ = "0.2.0"

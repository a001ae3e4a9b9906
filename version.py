"""Manta's version, part of the key under which measurements are stored, and its name on a package index."""

DISTRIBUTION = "manta-dflash"  # pyproject.toml's; the package `manta` of PyPI is another project's
__version__ = "0.2.0"

"""The package `manta` is this folder; each folder of the layers with an `__init__.py` is a package of it."""

from setuptools import find_packages, setup

LAYERS = ("cluster", "drafter", "actors", "jobs")
FOUND = find_packages(include=[pattern for layer in LAYERS for pattern in (layer, f"{layer}.*")])

# Named, so that the file itself is not taken for a module of `manta`.
setup(script_name="setup.py", packages=["manta", *(f"manta.{package}" for package in FOUND)])

"""The former place of `middlewares`, which Ray's environment may still name; goes with the next release."""

from .serve.serve_hooks import middlewares

__all__ = ["middlewares"]

"""The former module of `middlewares`, which Ray's environment may still name; removed in the next release."""

from .serve.serve_hooks import middlewares

__all__ = ["middlewares"]

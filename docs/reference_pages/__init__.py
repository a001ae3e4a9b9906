"""Generates the site's reference pages from the code: parsers, settings, metrics, OpenAPI, docstrings.

`docs/hooks.py` passes the Markdown to mkdocs as if it were files; nothing is stored, so pages are never
stale. Imports neither torch nor Ray.
"""

"""The gateway: one address for several replicas and models, with routing, retries and resumed streams.

Start with `app.py`; `generation_proxy.py` follows one request.
"""

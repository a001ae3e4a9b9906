"""A drafter on a device of its own: server, clients, supervision. Start with `drafter_server.py`."""

"""A request as the engine knows it: prompt, sampling parameters, grammar, caller. Start with `request.py`."""

"""Records of requests and steps for `/explain` and `manta logs`. Start with `flight_recorder.py`."""

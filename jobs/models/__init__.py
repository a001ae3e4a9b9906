"""Published models that one small command gets: `manta models`. Start with `published_models.py`."""

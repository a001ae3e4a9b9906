"""Files and formats of drafters."""

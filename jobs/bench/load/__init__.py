"""Load on an engine in this process, and its records; start with engine_driver.py."""

"""`manta bench sweep`: compares all draft lengths and methods with plain decoding by load; see run.py."""

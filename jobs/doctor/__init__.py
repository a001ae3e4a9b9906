"""`manta doctor`: what this machine has, what Manta makes of it, and whether it computes what it should."""

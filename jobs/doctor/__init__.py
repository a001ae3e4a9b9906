"""`manta doctor`: reports what this machine has, and checks that Manta computes correctly on it."""

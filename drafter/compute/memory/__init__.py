"""K/V caches and recurrent states in memory."""

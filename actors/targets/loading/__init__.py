"""Loading of a rank: settings, memory, models and warm-up."""

"""Loading of a rank: plan, memory, models and warm-up."""

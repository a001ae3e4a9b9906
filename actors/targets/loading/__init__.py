"""From settings to a rank that is warm: plan, memory, models, first steps."""

"""Routes for operators: health, metrics, explain."""

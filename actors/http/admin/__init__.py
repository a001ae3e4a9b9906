"""Routes for operators: health, explain, usage."""

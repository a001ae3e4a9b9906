"""Routes for operators: health, metrics, receipts, explain."""

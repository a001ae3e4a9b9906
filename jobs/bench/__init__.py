"""Measurements: of speculation, against others, of a step, beside busy processes."""

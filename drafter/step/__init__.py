"""The rule of a step: rows, choice under noise, verdict."""

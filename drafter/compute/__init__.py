"""The ground of both models: what an operator means, and faster ways to say it."""

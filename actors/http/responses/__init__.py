"""OpenAI's Responses API, without storage: each request brings its whole conversation."""

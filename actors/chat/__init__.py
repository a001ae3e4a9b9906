"""Chat formats: prompts from messages and tools, parsing of model output. Contains no HTTP."""

"""Names of a checkpoint's files, and of its templates."""

TOKENIZER_JSON, TIKTOKEN_MODEL = "tokenizer.json", "tiktoken.model"
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates

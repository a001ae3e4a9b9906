"""Opens a checkpoint's files in any of the formats that `quantization` and `gguf` define."""

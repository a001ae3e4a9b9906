"""Readers of quantized checkpoints: one module per format; matrices are dequantized when they are read.

Start with `quantized_tensors.py`, which is the table from a matrix's name to its scheme;
`read_quantization.py` reads config.json.
"""

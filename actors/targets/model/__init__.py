"""Parts that all families share: the spec, weights, the decoder, and tensor parallelism."""

"""What all families share: the spec, weights, the decoder, and how ranks split it."""

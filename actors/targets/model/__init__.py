"""What all families share: config, weights, the decoder, and how ranks split it."""

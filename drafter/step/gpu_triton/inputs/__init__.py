"""A step's inputs on the GPU."""

"""The target model: weights, forward pass, and the execution of one decoding step."""

"""What a checkpoint means, a family in each file."""

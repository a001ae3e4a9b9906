"""What a conversation's texts mean: prompts out of messages and tools, answers taken apart. No HTTP here."""

"""What attention does to each head of a model, and whether that is an alarm."""

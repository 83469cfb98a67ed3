"""What is tuned, and the key that identifies a call."""

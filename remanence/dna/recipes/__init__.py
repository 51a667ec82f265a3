"""Training runs on DNA."""

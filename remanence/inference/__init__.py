"""A trained model in use: reading, sessions, generation, decoding, memory files."""

"""Memory layers: the neural memory of Titans, and the kNN memory of the Memorizing Transformer."""

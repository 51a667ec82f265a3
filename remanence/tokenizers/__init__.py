"""Text and DNA to tokens and back."""

"""Convert text to tokens and back."""

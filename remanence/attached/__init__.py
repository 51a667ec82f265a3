"""A memory for a pretrained Hugging Face model: its configuration, one adapter per model family, and its folder.

Use `remanence.attach`; it returns a class of `remanence.hf`. The package is not called `attach`, because importing a
module of it would replace the function `remanence.attach`.
"""

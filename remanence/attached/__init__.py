"""A memory for a pretrained Hugging Face model: its configuration, one adapter per model family, and its folder.

`remanence.attach` attaches one; `remanence.hf` has the class that it returns. The package is not called `attach`, as
importing a module of it would replace the function `remanence.attach`.
"""

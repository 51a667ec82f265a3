"""A memory for a pretrained Hugging Face model: which layers get one, how they read, and the folder that keeps it.

`remanence.attach` is the door; `remanence.hf` has the class that it returns.
"""

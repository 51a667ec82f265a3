"""Memories for pretrained Hugging Face models: the configuration, one adapter per model family, saving and
loading.

Use the function `remanence.attach`; it returns a `remanence.hf.AttachedForCausalLM`. The package is not
called `attach`, because importing one of its modules would replace the function `remanence.attach`.
"""

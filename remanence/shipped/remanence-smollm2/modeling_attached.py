"""For Hugging Face, with trust_remote_code=True: the model is in the package remanence[hf]."""

from remanence.hf import AttachedConfig, AttachedForCausalLM

__all__ = ["AttachedConfig", "AttachedForCausalLM"]

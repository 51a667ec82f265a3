"""For Hugging Face, with trust_remote_code=True: the model is in the package remanence[hf]."""

from remanence.hf import RemanenceConfig, RemanenceForCausalLM

__all__ = ["RemanenceConfig", "RemanenceForCausalLM"]

"""For Hugging Face, with trust_remote_code=True: the model is in the package remanence (pip install 'remanence[hf]')."""

from remanence.hf import RemanenceConfig, RemanenceForCausalLM

__all__ = ["RemanenceConfig", "RemanenceForCausalLM"]

"""Our models in Hugging Face: after ``import remanence.hf``, or with ``trust_remote_code=True``, its Auto classes read
the folders that `Model.save` writes.

``generate``, pipelines, the Trainer and lm-eval then work as on any causal language model. The native model is inside,
with all that it can do: ``hf_model(tokens, memory_mode="frozen")``. A pretrained model gets a memory by `attach`.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(f"remanence.hf needs the extra 'hf': pip install 'remanence[hf]' ({error})") from None

from remanence.hf.attached import AttachedConfig, AttachedForCausalLM, attach, detach
from remanence.hf.native import RemanenceCache, RemanenceConfig, RemanenceForCausalLM

__all__ = [
    "AttachedConfig",
    "AttachedForCausalLM",
    "RemanenceCache",
    "RemanenceConfig",
    "RemanenceForCausalLM",
    "attach",
    "detach",
]

"""Remanence models as Hugging Face models. After ``import remanence.hf``, or with ``trust_remote_code=True``,
the Auto classes of transformers can load the folders that `Model.save` writes.

``generate``, pipelines, the Trainer and lm-eval then work as with any causal language model. The attribute
``model`` is the native `Model`, and its memory modes are available: ``hf_model(tokens, memory_mode="frozen")``.
`attach` adds a memory to a pretrained model.
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

"""The memory operator: one function with one signature and several backends.

Axes in the shapes of this package: b batch rows, t tokens, h heads, e width of a head (f if that of the keys
differs), r rows of a state (one per document), c tokens of a chunk, n chunks, m rows times heads, p tensors
per weight in a state (2: the weight and its momentum; 1: the weight alone).
"""

from remanence.ops import channel_decay as channel_decay  # these add to NETS and RULES
from remanence.ops import large_chunk as large_chunk
from remanence.ops import miras as miras
from remanence.ops import omega as omega
from remanence.ops.clamp import clamped, reset_clamped
from remanence.ops.nets import MLP, NETS, Deep, FeatureNet, Net, Sparse
from remanence.ops.operator import BACKENDS, current_weights, memorize, query, recall, start
from remanence.ops.rules import LOSSES, RULES, LinearRule, Rule
from remanence.ops.state import Gates, MemoryState, RuleState
from remanence.runtime.deprecation import renamed_names

__all__ = [
    "BACKENDS",
    "LOSSES",
    "MLP",
    "NETS",
    "RULES",
    "Deep",
    "FeatureNet",
    "Gates",
    "LinearRule",
    "MemoryState",
    "Net",
    "Rule",
    "RuleState",
    "Sparse",
    "clamped",
    "current_weights",
    "memorize",
    "query",
    "recall",
    "reset_clamped",
    "settle",
    "start",
]

__getattr__ = renamed_names(
    globals(),
    {"ask": "query", "settle": "current_weights", "leashed": "clamped", "reset_leashed": "reset_clamped"},
)

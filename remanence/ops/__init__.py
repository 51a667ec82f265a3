"""The memory operator: one function, several backends, one signature."""

from remanence.ops import large_chunk as large_chunk  # adds to NETS and RULES
from remanence.ops.leash import leashed, reset_leashed
from remanence.ops.nets import MLP, NETS, Deep, Net
from remanence.ops.operator import BACKENDS, ask, memorize, recall, settle, start
from remanence.ops.rules import LOSSES, RULES, LinearRule, Rule
from remanence.ops.state import Gates, MemoryState, RuleState

__all__ = [
    "BACKENDS",
    "LOSSES",
    "MLP",
    "NETS",
    "RULES",
    "Deep",
    "Gates",
    "LinearRule",
    "MemoryState",
    "Net",
    "Rule",
    "RuleState",
    "ask",
    "leashed",
    "memorize",
    "recall",
    "reset_leashed",
    "settle",
    "start",
]

"""The memory operator: one function, several backends, one signature."""

from remanence.ops.leash import leashed, reset_leashed
from remanence.ops.nets import MLP, NETS, Deep, Net
from remanence.ops.operator import BACKENDS, ask, memorize, recall, settle, start
from remanence.ops.rules import LOSSES, RULES, Rule
from remanence.ops.state import Gates, MemoryState

__all__ = [
    "BACKENDS",
    "LOSSES",
    "MLP",
    "NETS",
    "RULES",
    "Deep",
    "Gates",
    "MemoryState",
    "Net",
    "Rule",
    "ask",
    "leashed",
    "memorize",
    "recall",
    "reset_leashed",
    "settle",
    "start",
]

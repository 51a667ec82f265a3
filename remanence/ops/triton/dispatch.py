"""Choose between the Triton kernels and plain torch for a call on a GPU. All code that can run either asks
this module.

Each ``*_reason`` function returns a sentence that says why the kernels cannot run a call, or None if they
can. `KERNELS` lists the kernels that are turned on.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from remanence.ops.nets import MLP, Net
from remanence.ops.rules import LinearRule, Rule, is_linear
from remanence.ops.triton import launch, linear, mlp
from remanence.ops.triton.memory import Plan, plan_of
from remanence.ops.triton.resources import lacking

log = logging.getLogger("remanence")

KERNELS: tuple[str, ...] = ("layer", "memory", "decode", "search")
"""The groups of kernels that may run, named after what they compute. Groups that are left out run in torch.
Tests change this to compare the two.
"""

LAYER_WIDTH, LAYER_TAPS, LAYER_GATES, LAYER_FEATURES, LAYER_CHANNELS = 256, 16, 128, 512, 8192
"""Upper limits of the kernels in `layer`: head width, convolution taps, gates of all heads together, features
of one key, and channels.
"""

LAYER_DTYPES = (torch.float32, torch.bfloat16)
"""The input dtypes that the kernels in `layer` support."""

STORE_SLOTS = 2**30
"""The largest number of slots in a store that the kernels can search. Slot numbers are 32-bit, and padding to
whole tiles adds to them.
"""

OFF = "the kernels are turned off (remanence.ops.triton.dispatch.KERNELS)"
NO_TRITON = "triton cannot be imported (pip install 'remanence[triton]')"
NO_CUDA = "the kernels run on CUDA (or under TRITON_INTERPRET=1), got "
NO_INTEGERS = "the kernels know no int8 keys"
NO_DOUBLE = "the kernels compute in float32, got float64"

_logged: set[str] = set()


def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message unless this process has logged the same message before."""
    if message not in _logged:
        _logged.add(message)
        log.log(level, "%s", message)


def memory_backend(q: Tensor, v: Tensor, net: Net, rule: Rule, chunk: int, train: bool) -> str:
    """Return the backend that ``backend="auto"`` selects for a call of the memory operator: "triton" or
    "chunked". Each choice is logged once.
    """
    backend, why = "chunked", ""
    if q.device.type == "cuda":
        reason = memory_kind_reason(net, rule, q.shape[-1], v.shape[-1], chunk, q.dtype, q.device)
        if reason is None:
            reason = memory_chip_reason(q, v, net, rule, chunk, train)
            if reason is not None:  # unexpected on this GPU, and slower without the kernels
                log_once(f"memory operator: backend chunked, without the kernels: {reason}", logging.WARNING)
        backend, why = ("triton", "") if reason is None else ("chunked", f": {reason}")
    if not torch.compiler.is_compiling():
        log_once(f"memory operator: backend {backend}{why}")
    return backend


def memory_reason(q: Tensor, v: Tensor, net: Net, rule: Rule, chunk: int, train: bool) -> str | None:
    """Return why the kernels cannot run this call of the memory operator, or None if they can."""
    reason = memory_kind_reason(net, rule, q.shape[-1], v.shape[-1], chunk, q.dtype, q.device)
    return memory_chip_reason(q, v, net, rule, chunk, train) if reason is None else reason


def memory_chip_reason(q: Tensor, v: Tensor, net: Net, rule: Rule, chunk: int, train: bool) -> str | None:
    """Return why this GPU lacks the resources for the call's kernels, or None if it has them. Also None,
    without a check, during torch.compile, under Triton's interpreter, and for memories that have no kernels.
    """
    device = q.device
    if (
        not isinstance(net, MLP)
        or not is_linear(rule)
        or device.type != "cuda"
        or launch.interpreted()
        or torch.compiler.is_compiling()
    ):
        return None
    op = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    return chip_reason(plan_of(net, rule, q.shape[-1], v.shape[-1], q.shape[-2], chunk), op, device, train)


def memory_kind_reason(
    net: Net, rule: Rule, width: int, values: int, chunk: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why there are no kernels for this kind of memory, with keys of `width` and values of `values`
    channels, or None if there are. The resources of the GPU are not checked.
    """
    if "memory" not in KERNELS:
        return OFF
    if not is_linear(rule):
        return f"there are no kernels for the rule {type(rule).__name__}"
    if not isinstance(net, MLP) or net.depth > 2 or net.bias:
        return "the kernels know MLP memories of depth 1 and depth 2 without bias"
    if net.depth == 1:
        if not isinstance(rule.loss, str) or (rule.decay_first and rule.anchor != "token"):
            return "the kernels of depth 1 know the squared and dot losses, and decay_first only anchored at the token"
    elif rule.anchor != "chunk" or rule.decay_first or rule.loss != "squared":
        return "the kernels know the squared loss, anchored at the chunk's start, without decay_first"
    if not 1 <= min(width, values) <= max(width, values) <= launch.MAX_WIDTH:
        return f"the kernels know head widths up to {launch.MAX_WIDTH}, got {max(width, values)}"
    if not 1 <= chunk <= launch.MAX_WIDTH:
        return f"the kernels know chunks up to {launch.MAX_WIDTH}, got {chunk}"
    if launch.kernels() is None:
        return NO_TRITON
    if launch.interpreted():
        return None
    if device.type != "cuda":
        return NO_CUDA + device.type
    return NO_DOUBLE if dtype == torch.float64 else None


@cache
def chip_reason(plan: Plan, op: torch.dtype, device: torch.device, train: bool) -> str | None:
    """Return why a GPU lacks the resources for the kernels of a plan, or None if it has them. The kernels are
    compiled to find out; none is launched.
    """
    chip = torch.cuda.get_device_properties(device)
    shared = chip.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return build_reason(plan._replace(heads=1), op, 10 * chip.major + chip.minor, shared, train)


@cache
def build_reason(plan: Plan, op: torch.dtype, arch: int, shared: int, train: bool) -> str | None:
    """Like `chip_reason`, for a compute capability (90 for 9.0) with `shared` bytes of shared memory per
    block. No GPU is needed.
    """
    written = launch.kernels()
    if written is None:
        return None
    if isinstance(plan, linear.Plan):
        return lacking(written, linear.list_launches(plan, op, arch, train), arch, shared)
    return lacking(written, mlp.list_launches(plan, op, arch, train), arch, shared)


def layer_reason(
    x: Tensor, width: int = 1, taps: int = 1, gates: int = 1, features: int = 0, channels: int = 1
) -> str | None:
    """Return why the kernels of `layer` cannot run on x, or None if they can. The other arguments are the
    head width, the convolution taps, the gates of all heads together, the features of each key, and the
    channels.
    """
    if not x.is_cuda:
        return "the layer's kernels run on CUDA"
    if "layer" not in KERNELS:
        return OFF
    if not launch.HAS_TRITON:
        return NO_TRITON
    if x.dtype not in LAYER_DTYPES:
        return "the layer's kernels know float32 and bfloat16"
    if x.numel() == 0:
        return "there are no tokens"
    if channels > LAYER_CHANNELS:
        return f"the layer's kernels know up to {LAYER_CHANNELS} channels, got {channels}"
    if width > LAYER_WIDTH:
        return f"the layer's kernels know head widths up to {LAYER_WIDTH}, got {width}"
    if not 1 <= taps <= LAYER_TAPS:
        return f"the layer's kernels know 1 to {LAYER_TAPS} taps, got {taps}"
    if gates > LAYER_GATES:
        return f"the layer's kernels know up to {LAYER_GATES} gates, got {gates}"
    if features > LAYER_FEATURES:
        return f"the layer's kernels know up to {LAYER_FEATURES} features, got {features}"
    return None


def decode_reason(like: Tensor, width: int) -> str | None:
    """Return why the kernels cannot decode one token, for heads of this width and a state with the dtype and
    device of `like`, or None if they can.
    """
    if "decode" not in KERNELS:
        return OFF
    if launch.kernels() is None:
        return NO_TRITON
    if width > launch.MAX_WIDTH:
        return f"the kernels know head widths up to {launch.MAX_WIDTH}, got {width}"
    if launch.interpreted():
        return None
    if not like.is_cuda:
        return NO_CUDA + like.device.type
    return None if like.dtype == torch.float32 else f"the kernels decode states in float32, got {like.dtype}"


def decode_memory_reason(net: MLP, rule: LinearRule, chunk: int) -> str | None:
    """Return why there is no kernel that decodes one token with this kind of memory, or None if there is one."""
    two = net.depth == 2 and rule.loss == "squared" and rule.anchor == "chunk" and not rule.decay_first
    if net.bias or not isinstance(rule.loss, str) or not (net.linear or two):
        return (
            "the kernels decode two layers anchored at the chunk's start, or one without LayerNorm, both without bias; "
            f"got {net} and {rule}"
        )
    return (
        None
        if chunk <= launch.MAX_WIDTH
        else f"the kernels know chunks up to {launch.MAX_WIDTH}, got {chunk}"
    )


def search_reason(q: Tensor, keys: Tensor) -> str | None:
    """Return why the kernels cannot search these keys for these queries, or None if they can."""
    if "search" not in KERNELS:
        return OFF
    if not q.is_cuda and not launch.interpreted():
        return NO_CUDA + q.device.type
    if launch.kernels() is None:
        return NO_TRITON
    if keys.device != q.device:
        return f"the keys are on {keys.device.type}, the queries on {q.device.type}"
    if keys.dtype == torch.int8:
        return NO_INTEGERS
    if torch.float64 in (q.dtype, keys.dtype):
        return NO_DOUBLE
    if q.shape[-1] > launch.MAX_WIDTH:
        return f"the kernels know head widths up to {launch.MAX_WIDTH}, got {q.shape[-1]}"
    if keys.shape[1] > STORE_SLOTS:
        return f"the kernels know stores of up to {STORE_SLOTS} slots, got {keys.shape[1]}"
    return None

"""One token after the other, as fast as the device goes: a model's state in fixed places, written in place.

A step has fixed shapes and decides everything on the device, so that nothing waits for the host and, on CUDA, the whole of it is
one captured graph. Each kind of block has its step here, in the shape of blocks.py; the modules' own projections and norms do
the work. The state comes in and goes out as the ordinary `State`, and is the caller's own both times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.config import Mode
from remanence.inference.graphs import capture
from remanence.layers.attention import Attention, AttentionState, Heads, SegmentAttention, SegmentState
from remanence.memory.neural import NeuralMemoryState
from remanence.mixers import LMM, MAC, MAG, MAL, BothState, MACState, Memory, Softmax
from remanence.model import Model, State, memories
from remanence.ops import ask, decode
from remanence.ops.state import Weights

LEAST = 256
"""Tokens that full attention has room for at first; it is made anew, twice as long, when it is full."""


class Now(NamedTuple):
    """A step: how many tokens each row has read ``[r]``, which rows read one now ``[r]``, and what the layers share of it."""

    position: Tensor
    active: Tensor
    made: dict[Any, Any]

    def once(self, *key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


def attend(layer: Heads, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One query ``[r 1 h e]`` over ``[r keys h e]`` where the mask ``[r keys]`` is true."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return layer.out(F.scaled_dot_product_attention(q, k, v, mask[:, None, None]).transpose(1, 2))


def places(prefix: tuple[Tensor, Tensor], rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Room for keys and values ``[r p+count h e]``, the persistent ones in front."""
    k, v = (x.new_zeros(rows, x.shape[0] + count, *x.shape[1:]) for x in prefix)
    for buffer, x in zip((k, v), prefix, strict=True):
        buffer[:, : x.shape[0]] = x
    return k, v


class Window:
    """Attention over what was read last. Keys and values lie in a ring, a token at its position modulo the ring's size: keys are
    rotated already, so their order does not matter.
    """

    def __init__(self, layer: Attention, state: AttentionState) -> None:
        self.layer, self.begun, self.slack = layer, state.position.clone(), state.slack.clone()
        rows, past = state.k.shape[:2]
        self.size = past + 1 if layer.window else 2 * max(past, LEAST // 2)
        self.room = None if layer.window else self.size - past
        prefix = layer.prefix(state.k)
        self.lead = prefix[0].shape[0]
        self.k, self.v = places(prefix, rows, self.size)
        for buffer, x in ((self.k, state.k), (self.v, state.v)):
            buffer[self._last(state.position, past)] = x.detach()

    def _last(self, position: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Where the last `count` tokens are, the newest last."""
        token = position.unsqueeze(-1) + torch.arange(-count, 0, device=position.device)
        return torch.arange(len(position), device=position.device).unsqueeze(-1), self.lead + token % self.size

    def _mask(self, position: Tensor) -> Tensor:
        position = position.unsqueeze(-1)
        age = (position - torch.arange(self.size, device=position.device)) % self.size
        seen = (age <= position) & (age < (self.layer.window or self.size))
        return torch.cat([seen.new_ones(len(seen), self.lead), seen], 1)

    def step(self, x: Tensor, now: Now) -> Tensor:
        layer, shape = self.layer, (self.size, self.lead, self.layer.window)
        q, (k, v) = layer.queries(x), layer.pairs(x)
        turn = now.once(layer.width, layer.rotary, make=lambda: layer.turn(now.position.unsqueeze(-1), q.dtype))
        slot = now.once("slot", *shape, make=lambda: self.lead + now.position % self.size)
        mask = now.once("mask", *shape, make=lambda: self._mask(now.position))
        decode.put(self.k, slot, turn(k)[:, 0], now.active)
        decode.put(self.v, slot, v[:, 0], now.active)
        return attend(layer, turn(q), self.k, self.v, mask)

    def state(self, position: Tensor) -> AttentionState:
        full = self.layer.window is None
        where = self._last(position, int(position.max()) if full else self.size - 1)
        slack = position if full else (self.slack + position - self.begun).clamp(max=self.layer.slack)
        return AttentionState(self.k[where], self.v[where], position.clone(), slack.clone())


class Segment:
    """MAC's attention: places for what was retrieved and for the tokens of a whole segment, from the left."""

    def __init__(self, layer: SegmentAttention, state: SegmentState) -> None:
        self.layer, self.size = layer, layer.segment
        prefix = layer.prefix(state.tokens[0])
        self.lead = prefix[0].shape[0]
        self.k, self.v = places(prefix, len(state.position), 2 * self.size)
        for first, pair in zip(self._firsts, (state.retrieved, state.tokens), strict=True):
            for buffer, x in zip((self.k, self.v), pair, strict=True):
                buffer[:, first : first + self.size - 1] = x.detach()

    @property
    def _firsts(self) -> tuple[int, int]:
        return self.lead, self.lead + self.size

    def _mask(self, place: Tensor, retrieved: bool) -> Tensor:
        seen = torch.arange(self.size, device=place.device) <= place.unsqueeze(-1)
        return torch.cat([seen.new_ones(len(seen), self.lead), seen & retrieved, seen], 1)

    def step(self, x: Tensor, retrieved: Tensor | None, now: Now) -> Tensor:
        layer, shape = self.layer, (self.size, self.lead)
        place = now.once("place", self.size, make=lambda: now.position % self.size)
        q = layer.queries(x)
        turn = now.once("segment", layer.width, layer.rotary, make=lambda: layer.turn(place.unsqueeze(-1), q.dtype))
        mask = now.once("segment mask", *shape, make=lambda: self._mask(place, retrieved is not None))
        for first, source in zip(self._firsts, (retrieved, x), strict=True):
            k, v = (torch.zeros_like(q),) * 2 if source is None else layer.pairs(source)
            decode.put(self.k, first + place, turn(k)[:, 0], now.active)
            decode.put(self.v, first + place, v[:, 0], now.active)
        return attend(layer, turn(q), self.k, self.v, mask)

    def state(self, position: Tensor) -> SegmentState:
        place = position % self.size
        held = (torch.arange(self.size - 1, device=place.device) < place.unsqueeze(-1))[..., None, None]
        cut = lambda x, first: torch.where(held, x[:, first : first + self.size - 1], 0.0)
        retrieved, tokens = ((cut(self.k, first), cut(self.v, first)) for first in self._firsts)
        return SegmentState(retrieved, tokens, place)


class Remembering:
    """A neural memory, as the mode says: `blocks.Memory`."""

    def __init__(self, module: Memory, state: NeuralMemoryState, mode: Mode) -> None:
        self.layer, self.mode = module.layer, mode
        q, k, v = (past.detach().clone() for past in state.conv)
        self.conv = (q, k, v)
        self.memory = state.memory
        self.fused = decode.fits(q, self.layer.head_dim) and self.layer.q_conv.weight is not None
        if mode == "on":
            self.running = decode.Running(state.memory, self.layer.net, self.layer.rule)
        else:  # not written, so what it has to say is known
            self.weights = tuple(weight.detach().contiguous() for weight in self.layer.settle(state))

    def settled(self) -> Weights:
        return self.running.settled() if self.mode == "on" else self.weights

    def step(self, x: Tensor, now: Now) -> Tensor:
        if self.mode == "off":
            return torch.zeros_like(x)
        layer = self.layer
        if self.mode == "frozen":
            y, past_q = layer.ask(x, self.weights, self.conv[0])
            past_k = layer.k_conv.advance(layer.k_proj(x), self.conv[1], None)
            past_v = layer.v_conv.advance(layer.v_proj(x), self.conv[2], None)
            decode.keep(self.conv, (past_q, past_k, past_v), now.active)
            return y
        if self.fused:
            parts = ((layer.q_proj, layer.q_conv), (layer.k_proj, layer.k_conv), (layer.v_proj, layer.v_conv))
            q, k, v = self._convolve(x, parts, self.conv, now)
            q, k = (layer.lift(each.unsqueeze(1))[:, 0] for each in (q, k))
            gates = layer.log_gates(x)
        else:
            q, k, v, gates, conv = layer.prepare(x, self.conv)
            decode.keep(self.conv, conv, now.active)
            q, k, v = q[:, 0], k[:, 0], v[:, 0]
        answers, _ = self.running.step(q, k, v, gates.map(lambda gate: gate[:, 0]), now.active)
        return layer.output(q.unsqueeze(1), answers.unsqueeze(1).to(x.dtype), layer.g_proj(x))

    def ask(self, x: Tensor, weights: Weights, past: Tensor, now: Now) -> Tensor:
        """What given weights answer; the history is the caller's, and goes on."""
        layer = self.layer
        if not self.fused:
            y, new = layer.ask(x, weights, past)
            decode.keep((past,), (new,), now.active)
            return y
        (q,) = self._convolve(x, ((layer.q_proj, layer.q_conv),), (past,), now)
        q = layer.lift(q.unsqueeze(1))
        return layer.output(q, ask(q, weights, net=layer.net), layer.g_proj(x))

    def _convolve(self, x: Tensor, parts: Any, pasts: tuple[Tensor, ...], now: Now) -> list[Tensor]:
        xs = [projection(x)[:, 0] for projection, _ in parts]
        return decode.convolve(xs, pasts, [conv.weight for _, conv in parts], self.layer.heads, now.active)

    @property
    def diverged(self) -> Tensor:
        return self.running.diverged if self.mode == "on" else self.memory.diverged

    def state(self) -> NeuralMemoryState:
        q, k, v = (past.clone() for past in self.conv)
        return NeuralMemoryState(self.running.state if self.mode == "on" else self.memory, (q, k, v))


class Step(Protocol):
    """What a kind of block does with one token ``[r 1 d]`` of each row. `window` and `memory` where it has one."""

    def step(self, x: Tensor, now: Now) -> Tensor: ...

    def state(self, position: Tensor) -> Any: ...


class SoftmaxStep:
    def __init__(self, mixer: Softmax, state: AttentionState, mode: Mode) -> None:
        self.window = Window(mixer.attention, state)
        self.step, self.state = self.window.step, self.window.state


class LMMStep:
    def __init__(self, mixer: LMM, state: NeuralMemoryState, mode: Mode) -> None:
        self.memory = Remembering(mixer.memory, state, mode)
        self.step = self.memory.step

    def state(self, position: Tensor) -> NeuralMemoryState:
        return self.memory.state()


class BothStep:
    def __init__(self, mixer: MAG | MAL, state: BothState, mode: Mode) -> None:
        self.mixer: Any = mixer
        self.window, self.memory = Window(mixer.attention, state.attention), Remembering(mixer.memory, state.memory, mode)

    def state(self, position: Tensor) -> BothState:
        return BothState(self.window.state(position), self.memory.state())


class MAGStep(BothStep):
    def step(self, x: Tensor, now: Now) -> Tensor:
        return self.mixer.join(self.window.step(x, now), self.memory.step(x, now))


class MALStep(BothStep):
    def step(self, x: Tensor, now: Now) -> Tensor:
        return self.window.step(self.mixer.norm(x + self.memory.step(x, now)), now)


class MACStep:
    def __init__(self, mixer: MAC, state: MACState, mode: Mode) -> None:
        self.mixer = mixer
        self.memory, self.segment = Remembering(mixer.memory, state.memory, mode), Segment(mixer.attention, state.segment)
        self.weights = tuple(weight.detach().clone(memory_format=torch.contiguous_format) for weight in state.weights)
        self.asked = state.asked.detach().clone()
        # A segment is so many chunks. Unless the memory has missed a token, no chunk is open when one begins, and its weights
        # are settled as they stand.
        chunk, memory = state.memory.memory.chunk, state.memory.memory.position
        self.aligned = mode == "on" and torch.equal(state.segment.position % chunk, memory % chunk)

    def step(self, x: Tensor, now: Now) -> Tensor:
        mixer = self.mixer
        begins = now.once("begins", mixer.size, make=lambda: (now.position % mixer.size == 0) & now.active)
        if self.aligned:
            self.memory.running.adopt(self.weights, begins)
        else:
            decode.keep(self.weights, self.memory.settled(), begins)
        if self.memory.mode == "off":
            y = self.segment.step(x, None, now)
            return mixer.join(y, torch.zeros_like(y))
        h = self.memory.ask(x, self.weights, self.asked, now)
        y = self.segment.step(x, mixer.norm_retrieved(h), now)
        return mixer.join(y, self.memory.step(mixer.norm_written(x + y), now))

    def state(self, position: Tensor) -> MACState:
        weights = tuple(weight.clone() for weight in self.weights)
        return MACState(self.memory.state(), weights, self.asked.clone(), self.segment.state(position))


STEPS: dict[type, Callable[..., Step]] = {Softmax: SoftmaxStep, LMM: LMMStep, MAG: MAGStep, MAL: MALStep, MAC: MACStep}


def unsupported(model: Model, memory: Mode | None = None) -> str | None:
    """Why a `Decoder` cannot run this model in this mode, in words; None if it can."""
    if (memory or model.memory) == "fresh":
        return "memories that begin anew at every segment are not decoded in place"
    if torch.is_autocast_enabled(model.embed.weight.device.type):
        return "autocast is on, and decoding runs in the dtype of the weights"
    for block in model.blocks:
        if type(block.mixer) not in STEPS:
            return f"{type(block.mixer).__name__} is a block without a step in remanence.inference.decoder"
        layer = getattr(getattr(block.mixer, "memory", None), "layer", None)
        reason = layer and decode.unsupported(layer.net, layer.rule)
        if reason is not None:
            return reason
    return None


class Decoder:
    """``logits = Decoder(model, state).step(tokens)``, token after token; ``.state`` says where it stands.

    `memory` is the mode for all of its steps, the model's own unless given. `graph` says whether a step is captured as a CUDA
    graph: by default on CUDA. The weights must stay where they are; persistent tokens are read once.
    """

    def __init__(self, model: Model, state: State, memory: Mode | None = None, graph: bool | None = None) -> None:
        reason = unsupported(model, memory)
        if reason is not None:
            raise ValueError(f"model: expected one that can be decoded in place, but {reason}")
        self.model, self.mode = model, model._mode(memory or model.memory)
        self.device = model.embed.weight.device
        if graph and self.device.type != "cuda":
            raise ValueError(f"graph: expected None or False for a model on {self.device.type}, got True")
        self.captures = self.device.type == "cuda" if graph is None else graph
        self._check(state)
        self._begin(state)

    def _check(self, state: State) -> None:
        if not isinstance(state, State):
            raise ValueError(f"state: expected the State that this model returned, got {type(state).__name__}")
        self.model._check(torch.zeros(len(state.position), 1, dtype=torch.int64), state, None, None)
        layers = [getattr(getattr(block.mixer, "memory", None), "layer", None) for block in self.model.blocks]
        for layer, held in zip([layer for layer in layers if layer is not None], memories(state), strict=True):
            layer.check_state(held)

    @torch.no_grad()
    def _begin(self, state: State) -> None:
        pairs = zip(self.model.blocks, state.blocks, strict=True)
        self.steps = [STEPS[type(block.mixer)](block.mixer, part, self.mode) for block, part in pairs]
        self.position = state.position.clone()
        self.tokens, self.active = torch.zeros_like(self.position), torch.zeros_like(self.position, dtype=torch.bool)
        windows = [step.window for step in self.steps if hasattr(step, "window")]
        self.room = min((window.room for window in windows if window.room is not None), default=None)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        """Read one token ``[b]`` of each row that is active ``[b]`` (all, if None); logits ``[b v]`` of what follows it.

        Rows that are not active stay as they are, and their logits mean nothing.
        """
        for name, x, dtype in (("tokens", tokens, torch.int64), ("active", active, torch.bool)):
            if x is None and name == "active":
                continue
            if not isinstance(x, Tensor) or x.shape != self.position.shape or x.dtype != dtype:
                came = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name}: expected {dtype} of shape {list(self.position.shape)}, one per row, got {came}")
        if self.room is not None:
            if self.room == 0:
                self._begin(self.state)
            self.room -= 1
        if self.captures and self.graph is None:
            self._capture()
        self.tokens.copy_(tokens)
        if active is None:
            self.active.fill_(True)
        else:
            self.active.copy_(active)
        if self.graph is None:
            return self._forward()
        self.graph.replay()
        return self.logits.clone()

    def _forward(self) -> Tensor:
        now = Now(self.position, self.active, {})
        block: Any
        with torch.autocast(self.device.type, enabled=False):  # in the dtype of the weights, whoever asks
            x = self.model.embed(self.tokens).unsqueeze(1)
            for block, step in zip(self.model.blocks, self.steps, strict=True):
                x = x + step.step(block.norm_mixer(x), now)
                x = x + block.ffn(block.norm_ffn(x))
            self.position += self.active
            return self.model.logits(self.model.norm(x))[:, 0]

    def _capture(self) -> None:
        """Everything is run before it is captured, for what is loaded or compiled on first use; with no row active, so that
        nothing changes.
        """
        self.active.fill_(False)
        self.graph, self.logits = capture(self._forward, self.device)

    @property
    def diverged(self) -> Tensor:
        """Per row ``[b]``, as the state's; not one that is about to show in the next token's answers."""
        flags = [step.memory.diverged for step in self.steps if hasattr(step, "memory")]
        return torch.stack(flags).any(0) if flags else torch.zeros_like(self.active)

    @property
    @torch.no_grad()
    def state(self) -> State:
        """The state after all steps so far, to go on with anywhere."""
        return State(tuple(step.state(self.position) for step in self.steps), self.position.clone())

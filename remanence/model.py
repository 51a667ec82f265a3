"""A language model: tokens -> embedding -> blocks -> logits, with one state for all of it, and the folder it is saved in."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remanence.mixers.wavefront as wavefront
from remanence.config import MODES, Mode, ModelConfig, change, known
from remanence.core.files import aligned, read_json, read_tensors, write_json, write_tensors
from remanence.core.state import TensorTuple, advanced, placed, places
from remanence.layers import RMSNorm
from remanence.memory.policies import POLICIES, Tokens
from remanence.mixers import Block, Cuts, Seen
from remanence.mixers.knn import Aside, Knn, KnnState
from remanence.ops import MemoryState
from remanence.ops.checks import check_offsets, documents
from remanence.ops.layout import from_rows, pick, repad, to_rows

Schedule = Literal["wavefront", "layers"]


class _State(NamedTuple):
    blocks: tuple[Any, ...]
    position: Tensor


class State(_State, TensorTuple):
    """All that a model carries from call to call, one row per document: each block's state, and the tokens read ``[r]``.

    Returned by every call and never changed in place, so keeping one is enough to come back to it. Its size does not depend on
    how much was read, except with full attention.
    """

    __slots__ = ()

    @property
    def diverged(self) -> Bool[Tensor, " r"]:
        """Per row: whether any memory has been infinite or NaN since the document began."""
        flags = [memory.diverged for memory in memories(self)]
        return torch.stack(flags).any(0) if flags else torch.zeros_like(self.position, dtype=torch.bool)

    def crop(self, tokens: int) -> State:
        """The state before the last `tokens` tokens, which must lie in the memories' open chunk and have been written to them."""
        if tokens < 0 or bool((self.position < tokens).any()):
            raise ValueError(f"tokens: expected at most the {int(self.position.min())} tokens read, got {tokens}")
        for memory in memories(self):
            if tokens and not torch.equal(memory.position, self.position):
                raise ValueError(
                    "tokens: expected a state read with its memory on, got one whose memory did not read every token"
                )
        return State(tuple(block.crop(tokens) for block in self.blocks), self.position - tokens)


def memories(node: Any) -> list[MemoryState]:
    """Every `MemoryState` in a state, in the order of the layers."""
    if isinstance(node, MemoryState):
        return [node]
    return [found for child in node for found in memories(child)] if isinstance(node, tuple) else []


class Trace(NamedTuple):
    """All that can be seen of a call: the last layer's output, normalised ``[b t d]``; the state; each layer's memory, if any;
    what went into each layer ``[b t d]``.
    """

    hidden: Tensor
    state: State
    seen: Sequence[Seen | None]
    layers: Sequence[Tensor]

    @classmethod
    def join(cls, pieces: Sequence[Trace]) -> Trace:
        """Of a call that was read in pieces, one behind the other."""
        seen = wavefront.Later(len(pieces[0].seen), lambda layer: Seen.join([piece.seen[layer] for piece in pieces]))
        layers = wavefront.Later(len(seen), lambda layer: torch.cat([piece.layers[layer] for piece in pieces], 1))
        return cls(torch.cat([piece.hidden for piece in pieces], 1), pieces[-1].state, seen, layers)

    @property
    def surprise(self) -> Tensor | None:
        """Per token ``[b t]``, the mean over layers and heads; None without a memory that was written."""
        present = [seen.surprise.mean(-1) for seen in self.seen if seen is not None]
        return torch.stack(present).mean(0) if present else None


class Model(nn.Module):
    """``logits, state = Model(config)(tokens, state)``: pass None at a document's start, and what you got afterwards.

    ``model.memory`` says what becomes of the memories, neural and kNN: "on"; "off", as if there were none; "frozen", read but
    never written; "fresh", begun anew at every segment. ``model.checkpointing`` trades a second forward pass for memory in
    training. ``model.schedule`` is how MAC layers read whole segments: "wavefront", several layers at once where that can be
    (`remanence.mixers.wavefront`), or "layers", one after the other.
    """

    def __init__(self, config: ModelConfig, **fields: Any) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise ValueError(f"config: expected a ModelConfig, as preset('tiny') makes one, got {config!r}")
        self.config = change(config, fields)
        c = self.config
        self.embed = nn.Embedding(c.vocabulary, c.dim)
        self.blocks = nn.ModuleList(Block(name, c) for name in c.blocks)
        self.norm = RMSNorm(c.dim)
        self.head = None if c.tie else nn.Linear(c.dim, c.vocabulary, bias=False)
        stores = [block.mixer for block in self.blocks if isinstance(block.mixer, Knn)]
        for mixer in stores[1:] if c.knn.shared else ():
            mixer.borrow()
        # Counted from what a model is trained on, saved with it, and never trained.
        rare = bool(stores) and c.knn.write == "rare"
        self.log_unigrams = nn.Parameter(torch.empty(c.vocabulary), requires_grad=False) if rare else None
        # What a store is to hold is known only when all layers have read a segment, or is another layer's to say.
        self._stepwise = bool(stores) and (c.knn.write == "surprise" or (c.knn.shared and len(stores) > 1))
        self.checkpointing = False
        self._schedule: Schedule = "wavefront"
        self._memory: Mode = "on"
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scales that do not depend on the width: unit logits to begin with, and residual branches that grow with no depth.

        The blocks' parts have initialised themselves; see docs/paper.md.
        """
        nn.init.normal_(self.embed.weight, std=self.config.dim**-0.5)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=self.config.dim**-0.5)
        if self.log_unigrams is not None:
            nn.init.constant_(self.log_unigrams, -log(self.config.vocabulary))
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.endswith(("o_proj.weight", "down.weight")):
                    weight.mul_((2 * self.config.depth) ** -0.5)

    @property
    def memory(self) -> Mode:
        return self._memory

    @memory.setter
    def memory(self, mode: Mode) -> None:
        self._memory = self._mode(mode)

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        known("schedule", schedule, ("wavefront", "layers"))
        self._schedule = schedule

    @property
    def has_memory(self) -> bool:
        return any(hasattr(block.mixer, "memory") or isinstance(block.mixer, Knn) for block in self.blocks)

    def _mode(self, mode: Mode) -> Mode:
        known("memory", mode, MODES)
        if mode != "on" and not self.has_memory:
            raise ValueError(f"memory: expected 'on', as the blocks {self.config.pattern} have no memory, got {mode!r}")
        return mode

    def start(self, rows: int) -> State:
        """The state of `rows` documents of which nothing has been read."""
        place = self.embed.weight.device
        position = placed(torch.zeros(rows, dtype=torch.int64, device=place), [0] * rows)
        return State(tuple(block.start(rows) for block in self.blocks), position)  # type: ignore[operator]

    def forward(
        self,
        tokens: Int[Tensor, "b t"],
        state: State | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        offsets: Int[Tensor, "r+1"] | Sequence[int] | None = None,
        memory: Mode | None = None,
    ) -> tuple[Float[Tensor, "b t v"], State]:
        """Logits of what follows each token, and the state.

        Args:
            tokens: numbers below the vocabulary.
            state: None at a document's start, then what the call before returned.
            mask: true where a token counts. Padding, wherever it stands, is not read; its logits are those of a zero vector.
            offsets: for documents packed one behind the other in a single row: 0, each one's end, the last being t.
            memory: for this call only, instead of ``model.memory``.
        """
        seen = self.trace(tokens, state, mask=mask, offsets=offsets, memory=memory)
        return self.logits(seen.hidden), seen.state

    def logits(self, hidden: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        return F.linear(hidden, self.embed.weight if self.head is None else self.head.weight)

    def trace(
        self,
        tokens: Int[Tensor, "b t"],
        state: State | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        offsets: Int[Tensor, "r+1"] | Sequence[int] | None = None,
        memory: Mode | None = None,
        keep: bool = True,
    ) -> Trace:
        """`forward` up to the logits, with what each memory did beside it. If the state is not to be kept, as in training on
        packed documents, it may have no blocks: MAC is then read several layers and documents at once.
        """
        self._check(tokens, state, mask, offsets)
        if mask is not None and not bool(mask.all()):
            return self._trace_masked(tokens, state, mask, memory, keep)
        return self._trace(tokens, state, offsets, memory, keep)

    def _trace(
        self,
        tokens: Tensor,
        state: State | None,
        offsets: Tensor | Sequence[int] | None,
        memory: Mode | None,
        keep: bool,
    ) -> Trace:
        mode = self._memory if memory is None else self._mode(memory)
        rows = tokens.shape[0] if offsets is None else documents(offsets)
        borders = check_offsets(offsets, tokens.shape[0], tokens.shape[1], rows if state is None else len(state.position))
        nothing = lambda: placed(torch.zeros(rows, dtype=torch.int64, device=tokens.device), [0] * rows)
        position = nothing() if state is None else state.position
        if tokens.shape[1] == 0:
            none = self.embed(tokens)
            return Trace(none, state or self.start(rows), (None,) * len(self.blocks), (none,) * len(self.blocks))
        if self._stepwise:
            return self._trace_steps(tokens, state or self.start(rows), borders, mode)
        if borders is not None and state is None and not keep and mode == "on" and self._fronts():
            return self._pass_lanes(tokens, position, borders)
        return self._pass(tokens, state, position, borders, mode)

    def _pass(self, tokens: Tensor, state: State | None, position: Tensor, borders: list[int] | None, mode: Mode) -> Trace:
        """All layers, one after the other, or in a wavefront where that is faster."""
        whole = self._front(tokens, state, borders, mode)
        if whole is None:
            return self._pass_layers(tokens, state, position, borders, mode)
        pieces = []
        for part, schedule in ((slice(0, whole.start), self._pass_layers), (whole, self._pass_front),
                               (slice(whole.stop, None), self._pass_layers)):  # fmt: skip
            if (some := tokens[:, part]).shape[1]:
                pieces.append(schedule(some, state, position, None, mode))
                state, position = pieces[-1].state, pieces[-1].state.position
        return pieces[0] if len(pieces) == 1 else Trace.join(pieces)

    def _front(self, tokens: Tensor, state: State | None, borders: list[int] | None, mode: Mode) -> slice | None:
        """The whole segments of a call, if they are to be read in a wavefront."""
        size = self.config.segment
        if mode != "on" or borders is not None or tokens.shape[1] < wavefront.LEAST * size or not self._fronts():
            return None
        at = {0} if state is None else {place % size for place in places(state.position)}
        start = -min(at) % size
        count = max(0, tokens.shape[1] - start) // size
        if len(at) > 1 or count < wavefront.LEAST or not (state is None or self.remembers_all(state)):
            return None
        return slice(start, start + count * size)

    def _fronts(self) -> bool:
        """Whether whole segments are read in a wavefront."""
        if self.schedule == "layers" or torch.compiler.is_compiling():
            return False
        return wavefront.unsupported(list(self.blocks)) is None

    def _pass_lanes(self, tokens: Tensor, position: Tensor, borders: list[int]) -> Trace:
        """Packed documents from their starts, laid side by side; what they leave is lost."""
        there, back, begins = (x.to(tokens.device) for x in wavefront.lanes(borders, self.config.segment))
        x = pick(self.embed(tokens)[0], there)
        checkpointing = self.checkpointing and self.training and torch.is_grad_enabled()
        start = self.start(len(there)).blocks
        passed = wavefront.read(list(self.blocks), x, start, begins=begins, checkpointing=checkpointing)
        packed = lambda rows: rows.flatten(0, 1).index_select(0, back).unsqueeze(0)
        seen = wavefront.Later(len(passed.seen), lambda layer: Seen.mapped(passed.seen[layer], packed))
        layers = wavefront.Later(len(passed.layers), lambda layer: packed(passed.layers[layer]))
        counts = torch.tensor(borders, device=position.device).diff()
        return Trace(self.norm(packed(passed.x)), State((), position + counts), seen, layers)

    def remembers_all(self, state: State) -> bool:
        """Whether the memories have read what the model has: after a call with its memory off their chunks begin elsewhere."""
        return all(places(memory.position) == places(state.position) for memory in memories(state))

    def _pass_front(self, tokens: Tensor, state: State | None, position: Tensor, borders: None, mode: Mode) -> Trace:
        begun = (state or self.start(tokens.shape[0])).blocks
        checkpointing = self.checkpointing and self.training and torch.is_grad_enabled()
        x, ends, seen, layers = wavefront.read(list(self.blocks), self.embed(tokens), begun, checkpointing=checkpointing)
        return Trace(self.norm(x), State(ends, advanced(position, tokens.shape[1])), seen, layers)

    def _pass_layers(self, tokens: Tensor, state: State | None, position: Tensor, borders: list[int] | None, mode: Mode) -> Trace:
        """All layers, one after the other."""
        x = self.embed(tokens)
        worth = self._worth(tokens, position, borders)
        ends: list[Any] = []
        noted, layers, lent = [], [], None
        for index, block in enumerate(self.blocks):
            layers.append(x)
            inputs: list[Any] = [x, None if state is None else state.blocks[index], borders, mode]
            if isinstance(block.mixer, Knn):
                inputs.append(Aside(worth, lent))
            x, end, seen = self._call(block, *inputs)
            if self.config.knn.shared and lent is None and isinstance(end, KnnState):
                lent = end.store
            ends.append(end)
            noted.append(seen)
        counts = tokens.shape[1] if borders is None else torch.tensor(borders, device=position.device).diff()
        return Trace(self.norm(x), State(tuple(ends), advanced(position, counts)), tuple(noted), tuple(layers))

    @torch.no_grad()
    def _worth(self, tokens: Tensor, position: Tensor, borders: list[int] | None) -> Tensor | None:
        """What each token is worth to a store, as far as it is known before it is read."""
        write = self.config.knn.write
        if write not in ("rare", "random") or not any(isinstance(block.mixer, Knn) for block in self.blocks):
            return None
        where, back = to_rows(tokens, borders)
        place = position.unsqueeze(-1) + torch.arange(where.shape[1], device=tokens.device)
        # Not the row's place, which says nothing of its document: all rows draw alike.
        same = torch.zeros(len(where), dtype=torch.int64, device=tokens.device)
        return from_rows(POLICIES[write](Tokens(where, place, self.log_unigrams, document=same)), back).float()

    def _trace_steps(self, tokens: Tensor, state: State, borders: list[int] | None, mode: Mode) -> Trace:
        """Segment by segment through all layers."""
        window = self.config.window
        cuts = Cuts(tokens, borders, [place % window for place in places(state.position)], window)
        pieces, noted, layers = [], [], []
        for part in cuts:
            some = cuts.take(part)
            begun = state
            seen = self._pass(some, begun, begun.position, part.borders, mode)
            state = seen.state
            if self.config.knn.write == "surprise":
                state = self._rated(some, seen.hidden, begun, state, part.borders, mode)
            pieces.append(seen.hidden)
            noted.append(seen.seen)
            layers.append(seen.layers)
        columns = [cuts.join_seen(list(column)) for column in zip(*noted, strict=True)]
        joined = tuple(cuts.join(list(column)) for column in zip(*layers, strict=True))
        return Trace(cuts.join(pieces), state, tuple(columns), joined)

    @torch.no_grad()
    def _rated(self, tokens: Tensor, hidden: Tensor, begun: State, state: State, borders: list[int] | None, mode: Mode) -> State:
        """The state with what the tokens of a segment, just read, were worth: how little the model expected them."""
        (rows, _), (out, _) = to_rows(tokens, borders), to_rows(hidden, borders)
        counts = torch.tensor([rows.shape[1]] * len(rows) if borders is None else borders, device=rows.device)
        counts = counts if borders is None else counts.diff()
        before = next(part.last for part in begun.blocks if isinstance(part, KnnState))
        predicted = torch.cat([before.unsqueeze(1).to(out.dtype), out[:, :-1]], 1)
        surprise = F.cross_entropy(self.logits(predicted).float().flatten(0, 1), rows.flatten().long(), reduction="none")
        surprise = surprise.view_as(rows)
        nothing = torch.full_like(surprise[:, 0], log(self.config.vocabulary))  # what was expected of a document's first token
        surprise = torch.cat([torch.where(begun.position == 0, nothing, surprise[:, 0]).unsqueeze(-1), surprise[:, 1:]], 1)
        newest = out.gather(1, (counts - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, out.shape[-1])).squeeze(1)
        newest = torch.where((counts > 0).unsqueeze(-1), newest, before.to(out.dtype))
        place = (begun.position % self.config.window).unsqueeze(-1) + torch.arange(rows.shape[1], device=rows.device)
        place = place.where(torch.arange(rows.shape[1], device=rows.device) < counts.unsqueeze(-1), self.config.window)

        def with_worth(part: Any) -> Any:
            if not isinstance(part, KnnState):
                return part
            worth = part.worth
            if mode in ("on", "fresh"):
                worth = F.pad(worth, (0, 1)).scatter(1, place, surprise)[:, :-1]  # what is no token goes into one place more
            return part._replace(worth=worth, last=newest.to(part.last.dtype))

        return State(tuple(with_worth(part) for part in state.blocks), state.position)

    def _call(self, block: nn.Module, *inputs: Any) -> Any:
        if self.checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def _trace_masked(self, tokens: Tensor, state: State | None, mask: Tensor, memory: Mode | None, keep: bool) -> Trace:
        """Only the tokens that count, packed behind one another: padding then cannot touch memory, position or window."""
        borders = [0, *mask.sum(1).cumsum(0).tolist()]
        inside = self._trace(tokens[mask].unsqueeze(0), state, borders, memory, keep)

        def spread(seen: Seen | None) -> Seen | None:
            return Seen.mapped(seen, lambda tensor: repad(tensor, mask))

        layers = tuple(repad(layer, mask) for layer in inside.layers)
        return Trace(repad(inside.hidden, mask), inside.state, tuple(spread(seen) for seen in inside.seen), layers)

    def _check(self, tokens: Tensor, state: object, mask: object, offsets: object) -> None:
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            came = f"{list(tokens.shape)} {tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ValueError(f"tokens: expected whole numbers [batch, tokens], got {came}")
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.config.vocabulary:
                wrong = low if low < 0 else high
                raise ValueError(f"tokens: expected numbers from 0 to {self.config.vocabulary - 1} (the vocabulary), got {wrong}")
        if state is not None and (not isinstance(state, State) or len(state.blocks) != len(self.blocks)):
            raise ValueError(f"state: expected the State this model returned, or None, got {type(state).__name__}")
        for block, part in zip(self.blocks, state.blocks if isinstance(state, State) else (), strict=False):
            kind = getattr(block.mixer, "state", tuple)
            if not isinstance(part, kind):
                raise ValueError(f"state: expected one of this model ({kind.__name__}), got another's ({type(part).__name__})")
            if isinstance(block.mixer, Knn):
                block.mixer.check(part)  # type: ignore[arg-type]  # which has just been seen
        if mask is not None:
            if offsets is not None:
                raise ValueError("offsets: expected None beside a mask, got both; a mask already says where each document lies")
            if not isinstance(mask, Tensor) or mask.shape != tokens.shape or mask.dtype != torch.bool:
                came = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(f"mask: expected booleans of shape {list(tokens.shape)}, true where a token counts, got {came}")

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``; a tokenizer is saved by itself, `remanence.core.tokens`."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"folder: expected a folder to write into, got the file {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.named_parameters()}
        write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
        write_json(folder / "config.json", describe(self.config, self.embed.weight.dtype))

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Model:
        """The model that `save` (or ``save_pretrained`` of `remanence.hf`) wrote, in the dtype it was saved in or another: in the
        same one it computes the same to the last bit.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise ValueError(f"model: expected a folder with config.json and model.safetensors, got {folder}")
        with torch.device("meta"):
            model = cls(read_config(folder))
        found = {name.removeprefix("model."): tensor for name, tensor in _weights(folder).items()}
        wanted = dict(model.named_parameters())
        for name, parameter in wanted.items():
            if name not in found:
                raise ValueError(f"{folder / 'model.safetensors'}: expected a tensor {name!r}, which is missing")
            if found[name].shape != parameter.shape:
                came, expected = list(found[name].shape), list(parameter.shape)
                raise ValueError(f"{folder / 'model.safetensors'}: {name}: expected shape {expected}, got {came}")
            if not found[name].is_floating_point():
                raise ValueError(f"{folder / 'model.safetensors'}: {name}: expected real numbers, got {found[name].dtype}")
        for name in found:
            if name not in wanted:
                raise ValueError(f"{folder / 'model.safetensors'}: a tensor {name!r} that a model of this configuration has not")
        model = model.to_empty(device="cpu")
        found = {name: aligned(tensor.to(device, dtype or tensor.dtype)) for name, tensor in found.items()}
        model.load_state_dict(found, strict=False, assign=True)
        return model.to(device=device, dtype=dtype)


def _weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, in one file or, as Hugging Face saves large models, in several with an index; left in the files,
    so that a large model need not lie in memory twice on its way to another dtype or device.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return read_tensors(folder / "model.safetensors", mapped=0).tensors
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: expected a weight_map from tensors to files, got {type(places).__name__}")
    names = {Path(name).name for name in places.values()}
    return {name: tensor for part in sorted(names) for name, tensor in read_tensors(folder / part, mapped=0).tensors.items()}


def describe(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json``: a Hugging Face configuration whose ``remanence`` entry is ours."""
    return {
        "architectures": ["RemanenceForCausalLM"],
        "model_type": "remanence",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocabulary,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "tie_word_embeddings": config.tie,
        "remanence": config.to_dict(),
    }


def read_config(folder: Path) -> ModelConfig:
    data = read_json(folder / "config.json")
    if data.get("model_type") != "remanence" or not isinstance(data.get("remanence"), dict):
        raise ValueError(f"{folder / 'config.json'}: expected model_type 'remanence', got {data.get('model_type')!r}")
    return ModelConfig.from_dict(data["remanence"])


def parameters(config: ModelConfig) -> int:
    """How many parameters a model of this configuration has; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Model(config).parameters())


def matched(config: ModelConfig, target: int | None = None) -> ModelConfig:
    """The same with a feed-forward width that gives `target` parameters, by default those of a Transformer of the same preset.

    Hybrids carry attention and memory; variants compared at equal width of the feed-forward would differ by up to two thirds.
    Widths are multiples of 16, which matrix products on a GPU need to be fast (others took 4 times as long on an H200).
    """
    if target is None:
        target = parameters(change(config, {"pattern": ("attention",)}))
    per_unit = 3 * config.dim * config.depth
    rest = parameters(config) - per_unit * config.hidden
    ffn = 16 * round((target - rest) / per_unit / 16)
    if ffn < 16:
        raise ValueError(f"target: expected more than {rest:,}, what this model has without a feed-forward, got {target:,}")
    return change(config, {"ffn": ffn})

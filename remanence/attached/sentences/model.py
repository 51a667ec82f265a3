"""`SentenceModel`: a pretrained model with a memory of sentences.

The pretrained model reads with a sliding window. Sentences of plain text and of users' messages are stored with a key
computed from hidden states. Where an answer begins, the user's message is the query: the sentences with the nearest
keys are put behind the context, in the order in which they were read, and the answer is computed with these in its
context and with a low-rank update of the weights. As in Titans' MAC, what is retrieved is context. Any other text has
the logits of the pretrained model, and the memory of an open answer is the only thing that an answer changes: when it
has ended, the pretrained model reads its tokens like any others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from remanence.attached.config import AttachConfig
from remanence.attached.model import Attached
from remanence.attached.sentences import removal
from remanence.attached.sentences.adapter import SwitchedLora
from remanence.attached.sentences.call import Document, SentenceCall, documents_of
from remanence.attached.sentences.encoder import SpanEncoder
from remanence.attached.sentences.segments import ANSWER, TEXT, Position, Segmenter
from remanence.attached.sentences.state import SentenceState
from remanence.backbone import State, Trace
from remanence.config import Mode
from remanence.mixers import Mixer
from remanence.model import check_tokens
from remanence.tokenizers.tokens import Tokenizer

if TYPE_CHECKING:
    from remanence.attached.base import PretrainedSource


class Sentence(NamedTuple):
    """A stored sentence: its tokens, and its first and last position (exclusive)."""

    tokens: list[int]
    start: int
    end: int


class SentenceModel(nn.Module):
    """A pretrained model with a memory of sentences: ``logits, state = model(tokens, state)``.

    It satisfies the protocol `remanence.causal_model.CausalModel`. `attached` is the pretrained model with a sliding
    window; `encoder` computes keys and queries, and `adapter` is the low-rank update that answers are computed with.
    """

    folder: Path | None = None
    """The folder from which the model was loaded; None if it was not loaded."""
    log_unigrams = None

    def __init__(self, attached: Attached, flags: np.ndarray | None = None) -> None:
        super().__init__()
        self.attached = attached
        config = self.sentences = attached.config.sentences
        like = attached.embed.weight
        self.flags = nn.Parameter(
            torch.zeros(attached.vocab_size, dtype=torch.uint8) if flags is None else torch.from_numpy(flags),
            requires_grad=False,
        )
        self.encoder = SpanEncoder(attached.config.dim, config)
        self.adapter = SwitchedLora(attached.base.base_model.get_submodule("layers"), config.rank)
        self.to(like.device)
        self._segmenter: tuple[int, Segmenter] | None = None
        self._memory_mode: Mode = "on"

    # The interface of a language model.

    @property
    def config(self) -> AttachConfig:
        return self.attached.config

    @property
    def base(self) -> Any:
        """The pretrained model."""
        return self.attached.base

    @property
    def source(self) -> PretrainedSource:
        return self.attached.source

    @property
    def embed(self) -> nn.Embedding:
        return self.attached.embed

    @property
    def device(self) -> torch.device:
        return self.attached.device

    @property
    def vocab_size(self) -> int:
        return self.attached.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self.attached.max_positions

    @property
    def has_memory(self) -> bool:
        return True

    @property
    def mixers(self) -> Sequence[Mixer]:
        return []

    @property
    def checkpointing(self) -> bool:
        return self.attached.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self.attached.checkpointing = on

    @property
    def memory_mode(self) -> Mode:
        """The memory mode of calls that do not specify one."""
        return self._memory_mode

    @memory_mode.setter
    def memory_mode(self, mode: Mode) -> None:
        self._memory_mode = self.check_mode(mode)

    def check_mode(self, mode: Mode) -> Mode:
        return self.attached.check_mode(mode)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.attached.logits(hidden)

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the encoder and the adapter, and the flags of the vocabulary."""
        for name, parameter in self.named_parameters():
            if not name.startswith("attached."):
                yield name, parameter

    def current_config(self) -> AttachConfig:
        return self.attached.current_config()

    def upgrade_config(self, saved: dict[str, Any], where: str) -> dict[str, Any]:
        return self.attached.upgrade_config(saved, where)

    def pretrained_tokenizer(self) -> Tokenizer | None:
        return self.attached.pretrained_tokenizer()

    def capture_unsupported_reason(self, carries: bool) -> str | None:
        return self.attached.capture_unsupported_reason(carries)

    def decode_unsupported_reason(self, memory_mode: Mode) -> str | None:
        if memory_mode == "off":
            return "answers without a memory are read like other text"
        return self.attached.decode_unsupported_reason(memory_mode)

    def state_template(self) -> State:
        return self.start(1).map(lambda tensor: torch.empty_like(tensor, device="meta"))

    def state_layout(self) -> tuple[State, list[int]]:
        return self.state_template(), list(range(self.config.num_layers + 1))

    def describe(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        from remanence.attached.folder import describe

        return describe(self)

    def save(self, folder: str | Path) -> None:
        """Write the configuration, the new parameters, and the name and digest of the pretrained model."""
        from remanence.attached.folder import save

        save(self, folder)

    def detach(self) -> Any:
        """Remove the memory and return the pretrained model."""
        self.adapter.remove()
        return self.attached.detach()

    # States.

    @property
    def segmenter(self) -> Segmenter:
        """The segmenter with the present flags of the vocabulary."""
        version = self.flags._version
        if self._segmenter is None or self._segmenter[0] != version:
            self._segmenter = version, Segmenter(self.sentences, self.flags.detach().cpu().numpy())
        return self._segmenter[1]

    def start(self, rows: int) -> State:
        """The initial state of `rows` documents."""
        c, device = self.sentences, self.device
        like = self.embed.weight.detach()
        whole = lambda *shape: torch.zeros(rows, *shape, dtype=torch.int64, device=device)
        sentences = SentenceState(
            keys=like.new_zeros(rows, 0, c.key_dim),
            ids=torch.zeros(rows, 0, c.longest, dtype=torch.int32, device=device),
            spans=whole(0, 2),
            length=torch.zeros(rows, dtype=torch.int64, device=device),
            hidden=like.new_zeros(rows, c.history, len(c.layers) * self.config.dim),
            recent=whole(max(c.history, self.config.window or c.history)) - 1,
            scan=whole(len(Position._fields) + 1),
            pending=whole(0),
            skipped=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        plain = self.attached.start(rows)
        return State((*plain.blocks, sentences), plain.position)

    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
    ) -> tuple[Tensor, State]:
        """The logits of the next token at each position ``[b t v]``, and the new state."""
        trace = self.trace(tokens, state, mask=mask, offsets=offsets, memory_mode=memory_mode)
        return self.logits(trace.hidden), trace.state

    def trace(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | Sequence[int] | None = None,
        memory_mode: Mode | None = None,
        keep: bool = True,
        layers: bool = False,
    ) -> Trace:
        """Run `forward` without the logits."""
        if layers:
            raise ValueError(
                "layers: expected False for a memory of sentences, whose answers have a context of their own"
            )
        tokens = check_tokens(tokens, mask, self.vocab_size)
        mode = self._memory_mode if memory_mode is None else self.check_mode(memory_mode)
        documents = documents_of(tokens, mask, offsets, None if state is None else len(state.position))
        state = self.start(len(documents)) if state is None else state
        self._check(state, len(documents))
        call = SentenceCall(self, state, documents, mode)
        call.run()
        hidden = self.embed.weight.new_zeros(tokens.numel(), self.config.dim)
        index = torch.cat([each.places for each in documents]).to(self.device)
        found = [row.hidden for row in call.rows]
        if any(found):
            hidden = hidden.index_put((index,), torch.cat([part for parts in found for part in parts]))
        none = (None,) * (self.config.num_layers + 1)
        return Trace(hidden.view(*tokens.shape, -1), call.state(), none, ())

    def _check(self, state: object, rows: int) -> None:
        depth = self.config.num_layers + 1
        if (
            not isinstance(state, State)
            or len(state.blocks) != depth
            or not isinstance(state.blocks[-1], SentenceState)
        ):
            raise ValueError(
                f"state: expected the State this model returned, or None, got {type(state).__name__}"
            )
        if len(state.position) != rows:
            raise ValueError(f"state: expected {rows} rows, one for each document, got {len(state.position)}")

    # Sentences.

    def stored(self, state: State) -> list[list[Sentence]]:
        """The stored sentences of every row, in the order in which they were read."""
        own = state.blocks[-1]
        found = []
        for row, count in enumerate(own.length.tolist()):
            ids, spans = own.ids[row, :count].tolist(), own.spans[row, :count].tolist()
            found.append([Sentence(each[: b - a], a, b) for each, (a, b) in zip(ids, spans, strict=True)])
        return found

    @torch.no_grad()
    def search(self, state: State, tokens: Sequence[int]) -> list[list[tuple[int, float]]]:
        """For every row, the stored sentences by their similarity to a message of a user with these tokens: indices
        into `stored` and cosines, the most similar first.
        """
        form, rows = self.sentences.format, len(state.position)
        message = torch.tensor([[*form.user, *tokens, form.end]], device=self.device).expand(rows, -1)
        asked = self.trace(message, state, memory_mode="frozen").state
        query = SentenceCall(self, asked, [], "frozen").queries(list(range(rows)))
        own = state.blocks[-1]
        found = []
        for row, count in enumerate(own.length.tolist()):
            score = own.keys[row, :count].to(query.dtype) @ query[row]
            order = score.argsort(descending=True, stable=True)
            found.append(list(zip(order.tolist(), score[order].tolist(), strict=True)))
        return found

    def end_of_answer(self, state: State) -> list[int]:
        """The tokens that end an open answer of the first row, to be read before text that does not belong to it; empty
        if there is no open answer.
        """
        form, part = self.sentences.format, Position(*state.blocks[-1].scan[0, :-1].tolist()).part
        return [form.end, form.newline] if part == ANSWER else []

    @torch.no_grad()
    def close_sentence(self, state: State) -> State:
        """A state in which the open sentence of every row is stored, if it has at least two tokens. A sentence is
        otherwise stored when the next one begins or the message ends.
        """
        nothing = Document(np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64))
        call = SentenceCall(self, state, [nothing] * len(state.position), "on")
        opened = [row for row in call.rows if row.place.part == TEXT and row.read - row.place.start >= 2]
        for row in opened:
            hidden = call.own.hidden[row.index : row.index + 1, :0]
            call.store([row], [nothing.tokens], hidden, [[(row.place.start, row.read)]])
            row.place = row.place._replace(start=row.read)
        return call.state()

    @torch.no_grad()
    def without(self, state: State, remove: Sequence[int], row: int = 0) -> State:
        """A state of one row without the sentences `remove` (indices into `stored`).

        The other stored sentences stay. As an answer, or the hidden state of a later token, may depend on a removed
        sentence, the pretrained model goes on without the context of the window; an open sentence is stored first.
        The keys of other sentences are not computed again.
        """
        return removal.without(self, state.rows([row]), remove) if remove else state.rows([row])

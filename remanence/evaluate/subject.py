"""The subject of an evaluation: a recipe, or a model that reads texts, answers questions and scores options."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remanence.attached.folder import load_model
from remanence.config import Mode
from remanence.evaluate.checkpoint import ReadingCheckpoint
from remanence.inference.generate import Generation, Sampling, check_tokenizer
from remanence.inference.memfile import HasWeights
from remanence.inference.reader import PIECE, piece_size, piece_slices, read, token_pieces, traces
from remanence.io.files import read_json
from remanence.io.migrations import accepts_old_names
from remanence.io.shipped import resolve_model_path
from remanence.model import CausalModel, State
from remanence.runtime.errors import DivergedError
from remanence.tasks.answers import Answer, Likelihood
from remanence.tokenizers.tokens import Tokenizer, load_tokenizer, pair_tokens
from remanence.train import TRAINED, TrainConfig
from remanence.verticals import model_loader

LOGITS = 1 << 23
"""Maximum number of logits that are computed at a time for losses."""


class Evaluated(HasWeights, Protocol):
    """Interface of every evaluated model: a `remanence.model.CausalModel` or the model of a vertical."""

    def check_mode(self, mode: Mode) -> Mode: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


@accepts_old_names("subject")
@dataclass
class Subject:
    """The model or recipe to evaluate, with the device, the random seed and the folder for files."""

    device: torch.device
    seed: int = 0
    """Seed of all random numbers."""
    folder: Path | None = None
    """Folder for trained models of tasks that train. None: no folder."""
    network: Evaluated | None = None
    """The model. None if the subject is a recipe."""
    tokens: Tokenizer | None = None
    """The tokenizer in the model's folder. None: the folder has none, or it is not loaded yet."""
    recipe: TrainConfig | None = None
    """The recipe. None if the subject is a model."""
    source: Path = field(default_factory=Path)
    """Path of the model's folder or of the recipe."""
    on_tokens: Callable[[int], None] = lambda _: None
    """Called after each forward pass with the number of tokens that it read."""
    memory_mode: Mode = "on"
    """The memory mode of all forward passes."""
    checkpoint: ReadingCheckpoint = field(default_factory=ReadingCheckpoint)
    """Saved state of the unit being measured."""

    @classmethod
    def load(cls, source: Path, device: torch.device, **fields: object) -> Subject:
        """Load a model from its folder, from a run's folder, or by the name of an included model.

        `fields` sets other fields of the subject.
        """
        source = resolve_model_path(source)
        source = source / "model" if (source / "model" / "config.json").is_file() else source  # training run
        if (loader := model_loader(source)) is not None:
            return cls(device, network=loader(source, device=device).eval(), source=source, **fields)  # type: ignore[arg-type]
        model = load_model(source, device=device).eval()
        own = (source / "tokenizer.json").is_file()
        tokenizer = check_tokenizer(model, load_tokenizer(source)) if own else None
        return cls(device, network=model, tokens=tokenizer, source=source, **fields)  # type: ignore[arg-type]

    @property
    def evaluated(self) -> Evaluated:
        """The loaded model of any kind. Raises an error if the subject is a recipe."""
        if self.network is None:
            raise ValueError(f"model: expected the folder of a model, got the recipe {self.source}")
        return self.network

    @property
    def model(self) -> CausalModel:
        """The loaded language model. Raises an error if the model is of another kind."""
        if not isinstance(self.evaluated, CausalModel):
            title = getattr(self.network, "title", type(self.network).__name__)
            raise ValueError(f"model: expected a language model, got the {title} {self.source}")
        return self.evaluated

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, or the byte tokenizer if the model's folder has none. Raises an error if it
        does not fit the model's vocabulary.
        """
        if self.tokens is None:
            self.tokens = check_tokenizer(self.model, None)
        return self.tokens

    @property
    def trained(self) -> dict[str, Any]:
        """Facts about the training that were written to the model's folder. Empty if there are none."""
        path = self.source / TRAINED if self.source is not None else None
        return read_json(path) if path is not None and path.is_file() else {}

    def read(self, texts: Sequence[np.ndarray]) -> State:
        """Read several texts (token arrays) as one batch, in pieces, and return the state of all rows.

        An interrupted reading is resumed from the checkpoint.
        """
        digests = [hashlib.sha256(text.astype(np.int64).tobytes()).digest() for text in texts]
        digest = hashlib.sha256(b"".join(digests)).hexdigest()
        saved = self.checkpoint.load(self.model, digest)
        state, start = (saved[0], saved[1]["at"]) if saved else (self.model.start(len(texts)), 0)
        self.on_tokens(start * len(texts))
        size = piece_size(self.model)
        unread = [text[start:] for text in texts]
        for part in piece_slices(max(len(text) for text in unread), size):
            parts = [text[part].astype(np.int64) for text in unread]
            longest = max(len(part) for part in parts)
            padded = np.stack([np.pad(part, (0, longest - len(part))) for part in parts])
            tokens = torch.from_numpy(padded).to(self.device)
            lengths = torch.tensor([len(part) for part in parts])
            ragged = int(lengths.min()) < longest
            mask = (torch.arange(longest) < lengths[:, None]).to(self.device) if ragged else None
            state = read(self.model, tokens, state, mask=mask, memory_mode=self.memory_mode).state
            self.on_tokens(sum(len(part) for part in parts))
            progress = {"at": start + part.start + size}
            self.checkpoint.save(self.model, state, lambda progress=progress: progress, digest)  # type: ignore[misc]
        return state

    def answers(
        self,
        texts: Sequence[np.ndarray],
        prompts: Sequence[str],
        options: Sequence[Sequence[str]],
        max_tokens: int,
    ) -> list[Answer]:
        """Read each text and its prompt. Returns the generated answer and the likelihood of each option.

        If the memory diverges, the answer is empty and every option has probability 0.
        """
        state = self.read(texts)
        diverged = state.diverged.tolist()
        finite = [row for row in range(len(texts)) if not diverged[row]]
        generated_texts = {}
        if finite:
            generated = self.generate([prompts[row] for row in finite], state.rows(finite), max_tokens)
            generated_texts = dict(zip(finite, generated, strict=True))
        pairs = [
            (row, *pair_tokens(self.tokenizer, prompts[row], option))
            for row in finite
            for option in options[row]
        ]
        likelihoods: dict[int, list[Likelihood]] = {}
        size = max(len(texts), *map(len, options))  # each option needs a copy of the state
        for start in range(0, len(pairs), size):
            rows, befores, ends = zip(*pairs[start : start + size], strict=True)
            for row, each in zip(rows, self.likelihoods(befores, ends, state.rows(list(rows))), strict=True):
                likelihoods.setdefault(row, []).append(each)
        return [
            Answer("", [Likelihood(-np.inf, False)] * len(own))
            if diverged[row]
            else Answer(generated_texts[row], likelihoods[row])
            for row, own in enumerate(options)
        ]

    def generate(
        self, prompts: Sequence[str], state: State | None, max_tokens: int, stop: tuple[str, ...] = ()
    ) -> list[str]:
        """Generate the greedy answer to each prompt, starting from its row of the state.

        The answer is "" if the memory diverges. None as `state`: an empty memory.
        """
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, stop=stop)
        try:
            generation = Generation(
                self.model,
                prompts,
                sampling,
                tokenizer=self.tokenizer,
                state=state,
                memory_mode=self.memory_mode,
            )
            return generation.run().texts
        except DivergedError:
            if len(prompts) == 1:
                return [""]
            rows = [None if state is None else state.rows([row]) for row in range(len(prompts))]
            return [
                self.generate([prompt], row, max_tokens, stop)[0]
                for prompt, row in zip(prompts, rows, strict=True)
            ]

    @torch.no_grad()
    def likeliest(self, tokens: Tensor, state: State | None = None) -> Tensor:
        """Return the most likely next token ``[b t]`` after each token of ``[b t]``, on the CPU."""
        logits, _ = self.model(tokens.to(self.device), state, memory_mode=self.memory_mode)
        self.on_tokens(tokens.numel())
        return logits.argmax(-1).cpu()

    @torch.no_grad()
    def likelihoods(
        self, contexts: Sequence[Sequence[int]], ends: Sequence[Sequence[int]], state: State | None = None
    ) -> list[Likelihood]:
        """Return the log-likelihood of each ending after its context, which is read from its row of the
        state.
        """
        rows = [[*context, *end] for context, end in zip(contexts, ends, strict=True)]
        longest = max(len(row) for row in rows)
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        mask = torch.arange(longest, device=self.device) < lengths[:, None]
        pieces = traces(self.model, tokens, state, mask=mask, memory_mode=self.memory_mode)
        hidden = [trace.hidden for _, trace in pieces]
        self.on_tokens(int(lengths.sum()))
        features, found = torch.cat(hidden, 1), []
        for row, (context, end) in enumerate(zip(contexts, ends, strict=True)):
            logits = self.model.logits(features[row, len(context) - 1 : len(context) + len(end)]).float()
            targets = torch.tensor(list(end), device=self.device)
            log = -float(F.cross_entropy(logits[:-1], targets, reduction="sum"))
            *likeliest, following = logits.argmax(-1).tolist()
            greedy, after = likeliest == [*end], ""
            if greedy and self.tokens is not None:
                shown = self.tokens.decode([*end, following])
                after = shown.removeprefix(self.tokens.decode(list(end)))
            found.append(Likelihood(log if np.isfinite(log) else -np.inf, greedy, after))
        return found

    @torch.no_grad()
    def losses(self, rows: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the negative log-likelihood ``[b t]`` of all tokens ``[b t+1]`` except the first, and the
        new state.

        The losses are in nats and are computed in pieces. A diverged memory raises an error.
        """
        rows = rows.to(self.device)
        state = self.model.start(len(rows)) if state is None else state
        found = []
        step = max(1, LOGITS // self.model.config.vocab_size)
        for part, trace in traces(self.model, rows[:, :-1], state, memory_mode=self.memory_mode):
            state, targets = trace.state, rows[:, 1:][:, part]
            hidden, flat = trace.hidden.flatten(0, 1), targets.flatten()
            parts = []
            for start in range(0, len(flat), step):
                logits = self.model.logits(hidden[start : start + step]).float()
                parts.append(F.cross_entropy(logits, flat[start : start + step], reduction="none"))
            found.append(torch.cat(parts).view_as(targets))
            self.on_tokens(targets.numel())
            if bool(state.diverged.any()):
                problem = f"a memory that diverged before token {int(state.position[0]):,}"
                raise DivergedError(f"memory: expected finite numbers, got {problem}")
        return torch.cat(found, 1) if found else rows[:, 1:].float(), state

    def stream_losses(
        self, lists: Iterable[Sequence[int]], state: State | None = None
    ) -> Iterator[tuple[Tensor, State]]:
        """Yield `losses` of one text, given as lists of tokens, and the state after each piece.

        The state is carried from piece to piece, so memory use is constant.
        """
        for tokens in token_pieces(lists, PIECE, overlap=1):
            losses, state = self.losses(torch.tensor([tokens]), state)
            yield losses[0], state

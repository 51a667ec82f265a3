"""Training of a memory of sentences: rows of conversations, and the loss on their answers.

Two parts are trained at the same time: the encoder, to give a question and the sentences that answer it similar keys
(a contrastive loss), and the adapter, to write the answer from recalled sentences (the loss of a language model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from remanence.attached.sentences.call import recalled_context
from remanence.attached.sentences.segments import ANSWER, Position

if TYPE_CHECKING:
    from remanence.attached.sentences.model import SentenceModel

Encode = Callable[[str], list[int]]
LONG = 16
"""Number of tokens from which on the weight of an answer in the loss no longer grows."""
AnswerKind = Literal["question", "unknown", "chat", "context"]
"""What an answer is: the answer to a question about something that was stated; to one about something that was not; a
reply that needs no memory; or a reply that is not trained.
"""


class Exchange(NamedTuple):
    """A message of a user and the assistant's answer.

    `evidence` lists what states the answer: the index of an item of the conversation, and a text that its sentence
    contains. `ends` is False for an answer that was cut: its end is not trained.
    """

    user: str
    answer: str
    kind: AnswerKind = "chat"
    evidence: tuple[tuple[int, str], ...] = ()
    ends: bool = True


Item = str | np.ndarray | Exchange
"""A part of a conversation: plain text, tokens, or an exchange."""


class Question(NamedTuple):
    """An answer of a row: the span of its query, where the answer starts, its tokens with the end of the message
    (unless the answer was cut), and the indices of the sentences that state it.
    """

    query: tuple[int, int]
    start: int
    answer: list[int]
    kind: AnswerKind
    evidence: list[int]


class ChatRow(NamedTuple):
    """A conversation as tokens, its sentences ``(start, end)``, and its answers."""

    tokens: np.ndarray
    sentences: list[tuple[int, int]]
    questions: list[Question]


def chat_row(
    model: SentenceModel | Any,
    encode: Encode,
    decode: Callable[[list[int]], str],
    items: Sequence[Item],
    length: int,
) -> ChatRow:
    """The row of a conversation. Items that would exceed `length` tokens are left out, and so are exchanges whose
    evidence was. `model` has `sentences`, the configuration, and `segmenter`.
    """
    form, segmenter = model.sentences.format, model.segmenter
    tokens: list[int] = []
    spans: dict[int, tuple[int, int]] = {}
    exchanges: list[tuple[Exchange, int]] = []
    for index, item in enumerate(items):
        if isinstance(item, Exchange):
            if any(number not in spans for number, _ in item.evidence):
                continue
            asked = [*form.user, *encode(item.user), form.end, form.newline, *form.assistant]
            answer = [*encode(item.answer), form.end]
            if len(tokens) + len(asked) + len(answer) + 1 > length:
                continue
            spans[index] = (len(tokens), len(tokens) + len(asked))
            exchanges.append((item, len(tokens) + len(asked)))
            tokens += [*asked, *answer, form.newline]
        else:
            ids = encode(item) if isinstance(item, str) else item.tolist()
            if len(tokens) + len(ids) > length:
                continue
            spans[index] = (len(tokens), len(tokens) + len(ids))
            tokens += ids
    array = np.array(tokens, np.int64)
    sentences, places = _scan(segmenter, array)
    texts: dict[int, str] = {}
    questions = []
    for item, start in exchanges:
        place = places[start]
        evidence = []
        for number, text in item.evidence:
            begin, end = spans[number]
            for i, (a, b) in enumerate(sentences):
                if a < end and b > begin:  # a line break before an item belongs to its first sentence
                    known = texts.setdefault(i, decode(array[a:b].tolist()).lower())
                    if text.lower() in known:
                        evidence.append(i)
        if item.evidence and not evidence:
            continue
        query_end = place.question_end
        query = (max(place.question_start, query_end - model.sentences.query), query_end)
        answer = array[start : start + len(encode(item.answer)) + item.ends].tolist()
        questions.append(Question(query, start, answer, item.kind, evidence))
    return ChatRow(array, sentences, questions)


def _scan(segmenter: Any, tokens: np.ndarray) -> tuple[list[tuple[int, int]], dict[int, Position]]:
    """The sentences of a row, and the position of the scan where each answer starts."""
    sentences: list[tuple[int, int]] = []
    places: dict[int, Position] = {}
    at, position = 0, Position()
    while at < len(tokens):
        scanned = segmenter.scan(tokens[at:], at, position)
        sentences += scanned.sentences
        at, position = at + scanned.length, scanned.position
        if position.part == ANSWER:
            places[at] = position
            at += segmenter.answer_length(tokens[at:], at, position)
    return sentences, places


class Losses(NamedTuple):
    """The result of `answer_loss`. Gradients have been added to the parameters.

    addressing
        The mean contrastive loss.
    found
        The share of questions whose nearest sentence states the answer.
    reading
        The mean loss of the tokens of answers. An answer of more than `LONG` tokens counts like one of so many.
    answers, tokens
        The number of answers, and of tokens that were read for them.
    """

    addressing: float
    found: float
    reading: float
    answers: int
    tokens: int


def answer_loss(
    model: SentenceModel,
    rows: Sequence[ChatRow],
    rng: np.random.Generator,
    *,
    answers: int = 12,
    unknown: Callable[[np.random.Generator], list[int]] | None = None,
    addressing_weight: float = 0.3,
    part: int = 64,
    missed: float = 0.05,
    distractors: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    read: tuple[Tensor, Any] | None = None,
) -> Losses:
    """Run forward and backward of some rows. At most `answers` answers of each row are read, `part` at a time.

    `unknown` draws the tokens of an answer to a question whose evidence is not recalled, which happens with a
    probability of `missed`, so that the adapter learns to say so. `distractors` are sentences of other texts (their
    hidden states ``[n l d]``, and which tokens belong to each ``[n l]``), as further wrong choices. With `window`,
    answers see so many tokens of the conversation before them instead of the model's window, which takes less time.
    `read` is the result of `read_rows`, if it is known.
    """
    device = model.device
    hidden, cache = read_rows(model, rows) if read is None else read
    loss, contexts, found, known = _addressing(model, rows, hidden, rng, answers, missed, distractors)
    if loss is not None:
        (addressing_weight * loss).backward()
    chosen: list[tuple[int, Question, list[int], list[int]]] = []
    flags = model.segmenter.flags
    for row, question, sentences, stated in contexts:
        array = rows[row].tokens
        texts = [array[slice(*rows[row].sentences[n])].tolist() for n in sorted(sentences)]
        block = recalled_context(model.sentences.format, flags, texts)
        answer = question.answer if stated or unknown is None else unknown(rng)
        chosen.append((row, question, block, answer))
    chosen.sort(key=lambda each: len(each[2]) + len(each[3]))
    lengths = torch.tensor([len(answer) for *_, answer in chosen], device=device)
    weights = (LONG / lengths).clamp(max=1.0)
    total = (lengths * weights).sum().clamp(min=1)
    reading, count = torch.zeros((), device=device), 0
    for start in range(0, len(chosen), part):
        nats, size = _reading(model, chosen[start : start + part], cache, window)
        mean = (nats * weights[start : start + part]).sum() / total
        mean.backward()
        reading, count = reading + mean.detach(), count + size
    return Losses(
        0.0 if loss is None else float(loss.detach()),
        found / max(1, known),
        float(reading),
        len(chosen),
        count,
    )


def _window_mask(model: SentenceModel, query: Tensor, key: Tensor) -> Tensor:
    """Which keys a query sees, by their positions ``[... q]`` and ``[... k]``; keys at -1 are padding."""
    back = query.unsqueeze(-1) - key.unsqueeze(-2)
    window, sinks = model.config.window, model.config.sinks
    near = torch.ones_like(back, dtype=torch.bool) if window is None else back < window
    return (back >= 0) & (near | (key < sinks).unsqueeze(-2)) & (key >= 0).unsqueeze(-2)


@torch.no_grad()
def read_rows(model: SentenceModel, rows: Sequence[ChatRow]) -> tuple[Tensor, Any]:
    """Read rows without an adapter: the hidden states for the encoder ``[b t d]``, and the cache."""
    from transformers.cache_utils import DynamicCache

    longest = max(len(row.tokens) for row in rows)
    longest += -longest % 64
    padded = np.zeros((len(rows), longest), np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row.tokens)] = row.tokens
    tokens = torch.from_numpy(padded).to(model.device)
    place = torch.arange(longest, device=model.device).expand(len(rows), -1)
    mask = _window_mask(model, place[:1], place[:1]).unsqueeze(1)
    # A cache of one's own has all tokens; that of a model with sliding windows would only have the last ones.
    out = _base(model, tokens, place, mask.expand(len(rows), -1, -1, -1), DynamicCache(), True)
    states = [out.hidden_states[n] for n in model.sentences.layers]
    return model.encoder.features(states), out.past_key_values


def _base(model: SentenceModel, tokens: Tensor, place: Tensor, mask: Tensor, cache: Any, hidden: bool) -> Any:
    """Call the pretrained model with an explicit mask ``[b 1 q k]``."""
    given: Any = mask
    if (types := getattr(model.base.config, "layer_types", None)) is not None and len(set(types)) > 1:
        given = dict.fromkeys(set(types), mask)
    return model.base.base_model(
        input_ids=tokens, position_ids=place, attention_mask=given, past_key_values=cache, use_cache=True,
        output_hidden_states=hidden or None,
    )  # fmt: skip


def _spans(hidden: Tensor, spans: Sequence[tuple[int, int, int]], longest: int) -> tuple[Tensor, Tensor]:
    """Hidden states of spans ``(row, start, end)``, ``[n l d]``, and which of them are inside ``[n l]``."""
    row, start, end = torch.tensor(spans, device=hidden.device).unbind(-1)
    index = start.unsqueeze(-1) + torch.arange(longest, device=hidden.device)
    inside = index < end.unsqueeze(-1)
    return hidden[row.unsqueeze(-1), index.clamp(max=hidden.shape[1] - 1)], inside


def addressing_loss(
    model: SentenceModel,
    rows: Sequence[ChatRow],
    hidden: Tensor,
    distractors: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The contrastive loss of rows whose hidden states are known; 0 if none of their questions has evidence."""
    loss, *_ = _addressing(model, rows, hidden, np.random.default_rng(0), 0, 0.0, distractors)
    return hidden.new_zeros((), requires_grad=True) if loss is None else loss


def _addressing(
    model: SentenceModel,
    rows: Sequence[ChatRow],
    hidden: Tensor,
    rng: np.random.Generator,
    answers: int,
    missed: float,
    distractors: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor | None, list[tuple[int, Question, list[int], bool]], int, int]:
    """The contrastive loss, and for the answers that are read the row, the answer, the recalled sentences, and whether
    they state it. Last, the number of questions whose nearest sentence states the answer, and of all questions.
    """
    c = model.sentences
    spans = [(n, a, b) for n, row in enumerate(rows) for a, b in row.sentences]
    asked = [(n, *q.query) for n, row in enumerate(rows) for q in row.questions]
    if not spans or not asked:
        return None, [], 0, 0
    keys = model.encoder(*_spans(hidden, spans, c.longest), query=False)
    queries = model.encoder(*_spans(hidden, asked, c.query), query=True)
    score = queries @ keys.mT
    owner, _, ends = torch.tensor(spans, device=hidden.device).unbind(-1)
    asker, begin, _ = torch.tensor(asked, device=hidden.device).unbind(-1)
    own = owner == asker.unsqueeze(-1)
    allowed = own & (ends <= begin.unsqueeze(-1))
    first = np.cumsum([0, *(len(row.sentences) for row in rows)]).tolist()
    target = torch.zeros_like(score, dtype=torch.bool)
    questions = [(n, q) for n, row in enumerate(rows) for q in row.questions]
    pairs = [(i, first[n] + s) for i, (n, q) in enumerate(questions) for s in q.evidence]
    if pairs:
        target[tuple(torch.tensor(pairs, device=hidden.device).unbind(-1))] = True
    target &= allowed
    known = target.any(1)
    ranked = score.masked_fill(~allowed, -torch.inf)
    top = ranked.topk(min(c.recalled, score.shape[1]), 1)
    usable = (top.values > -torch.inf).tolist()
    nearest = [
        [n for n, ok in zip(a, b, strict=True) if ok]
        for a, b in zip(top.indices.tolist(), usable, strict=True)
    ]
    found = int((target.gather(1, top.indices[:, :1]).squeeze(1) & known).sum())
    loss = None
    if bool(known.any()):
        # Sentences of other rows are left out: "My favourite colour is blue" answers the same question there.
        scaled = score.masked_fill(~allowed, -1e4)
        if distractors is not None:
            scaled = torch.cat([scaled, queries @ model.encoder(*distractors, query=False).mT], 1)
            target = F.pad(target, (0, scaled.shape[1] - target.shape[1]))
        log_p = (scaled / model.encoder.log_temperature.exp()).log_softmax(1)
        loss = -log_p.masked_fill(~target, -1e4).logsumexp(1)[known].mean()
    reads: list[tuple[int, Question, list[int], bool]] = []
    number = 0
    for n, row in enumerate(rows):
        trained = [i for i, question in enumerate(row.questions) if question.kind != "context"]
        chance = rng.random(len(row.questions))  # replies that need no memory are drawn less often
        drawn = sorted(trained, key=lambda i: chance[i] + 0.6 * (row.questions[i].kind == "chat"))
        for i in (number + i for i in drawn[:answers]):
            question = questions[i][1]
            some, stated = [s - first[n] for s in nearest[i]], True
            if question.evidence:
                some, stated = _with_evidence(some, question, rng, missed)
            if rng.random() < 0.3:  # fewer sentences than usual
                drop = len(some) - int(rng.integers(0, 3))
                some = [s for place, s in enumerate(some) if s in question.evidence or place < drop]
            reads.append((n, question, some, stated))
        number += len(row.questions)
    return loss, reads, found, int(known.sum())


def _with_evidence(
    some: list[int], question: Question, rng: np.random.Generator, missed: float
) -> tuple[list[int], bool]:
    """Recalled sentences with one that states the answer, or rarely without."""
    if rng.random() < missed:
        return [s for s in some if s not in question.evidence], False
    if set(question.evidence) & set(some):
        return some, True
    return [*some[:-1], question.evidence[-1]], True


def _reading(
    model: SentenceModel,
    some: Sequence[tuple[int, Question, list[int], list[int]]],
    cache: Any,
    window: int | None = None,
) -> tuple[Tensor, int]:
    """The summed loss of the tokens of each answer ``[n]``, and the number of tokens that were read."""
    from transformers.cache_utils import DynamicCache

    device = model.device
    longest = max(len(block) + len(answer) for *_, block, answer in some)
    longest += -longest % 16
    tokens = np.zeros((len(some), longest), np.int64)
    counted = np.zeros((len(some), longest), bool)
    for number, (_, _, block, answer) in enumerate(some):
        both = block + answer
        tokens[number, : len(both)] = both
        counted[number, len(block) - 1 : len(both) - 1] = True
    start = torch.tensor([question.start for _, question, *_ in some], device=device)
    row = torch.tensor([each[0] for each in some], device=device)
    length, sinks = window or model.config.window or int(start.max()), model.config.sinks
    back = torch.arange(-length, 0, device=device)
    near = start.unsqueeze(-1) + back
    near = near.masked_fill(near < sinks, -1)
    far = torch.arange(sinks, device=device).expand(len(some), -1)
    far = far.masked_fill(far >= start.unsqueeze(-1), -1)
    past = torch.cat([far, near], 1)
    index = past.clamp(min=0)
    prefix = DynamicCache()
    for layer, pair in enumerate(cache.layers):
        k, v = (x.transpose(1, 2)[row.unsqueeze(-1), index].transpose(1, 2) for x in (pair.keys, pair.values))
        prefix.update(k, v, layer)
    place = start.unsqueeze(-1) + torch.arange(longest, device=device)
    mask = _window_mask(model, place, torch.cat([past, place], 1)).unsqueeze(1)
    given = torch.from_numpy(tokens).to(device)
    with model.adapter.active():
        hidden = _base(model, given, place, mask, prefix, False).last_hidden_state
    select = torch.from_numpy(counted).to(device)
    logits = model.logits(hidden[:, :-1][select[:, :-1]]).float()
    targets = given[:, 1:][select[:, :-1]]
    owner = torch.from_numpy(counted.nonzero()[0]).to(device)
    nats = logits.new_zeros(len(some)).index_add(0, owner, F.cross_entropy(logits, targets, reduction="none"))
    return nats, int(len(some) * longest)

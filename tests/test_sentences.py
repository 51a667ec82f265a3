"""A memory of sentences: what it stores, what an answer is computed from, and the laws of every model."""

import copy
import dataclasses
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from remanence import Session
from remanence.attached import base as pretrained
from remanence.attached.config import AttachConfig
from remanence.attached.model import Attached
from remanence.attached.sentences.call import recalled_context
from remanence.attached.sentences.config import ChatFormat, SentenceConfig
from remanence.attached.sentences.model import SentenceModel
from remanence.attached.sentences.segments import ANSWER, OTHER, TEXT, Position
from remanence.attached.sentences.training import (
    ChatRow,
    Exchange,
    _reading,
    answer_loss,
    chat_row,
    read_rows,
)
from remanence.attached.sentences.vocabulary import (
    END,
    NEWLINE,
    OPENS,
    SHORTENED,
    SPECIAL,
    STOP,
    is_shortened,
)
from remanence.causal_model import CausalModel
from remanence.inference import memfile
from remanence.inference.generate import Generation, Sampling
from remanence.tokenizers.tokens import ByteTokenizer

# Token ids: 3 starts a message, 6 ends one, 7 is a line break, 10 a full stop, 13 to 99 can start a sentence, 90 to 99
# are initials, and 11 is a question mark.
FORMAT = ChatFormat(
    user=(3, 4), assistant=(3, 5), end=6, newline=7, recall_start=(6, 7, 3, 8, 9), recall_end=(6, 7, 3, 5)
)
SETTINGS = SentenceConfig(
    layers=(1, 2), heads=2, head_dim=8, key_dim=12, recalled=2, longest=9, shortest=3, query=6, answer=20, rank=3,
    size=40, format=FORMAT,
)  # fmt: skip
WINDOW = 24


def vocabulary() -> np.ndarray:
    flags = np.zeros(300, np.uint8)
    flags[[3, 6]], flags[7], flags[10], flags[11] = SPECIAL | OPENS, NEWLINE | OPENS, END | STOP, END
    flags[13:90], flags[90:100] = OPENS, OPENS | SHORTENED
    return flags


def sentence_model(dtype=torch.float64, window=WINDOW, sinks=2, **changes) -> SentenceModel:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    base = LlamaForCausalLM(shape).eval()
    torch.nn.init.normal_(base.lm_head.weight, std=0.3)
    settings = dataclasses.replace(SETTINGS, **changes)
    config = AttachConfig(kind="sentences", window=window, sinks=sinks, sentences=settings)
    config = config.for_model(pretrained.digest(base), "self_attn", **pretrained.model_shape(base))
    model = SentenceModel(Attached(base.to(dtype), config), vocabulary())
    with torch.no_grad():
        for name, parameter in model.saved_parameters():
            if name.startswith(("adapter.up", "encoder.key_weight", "encoder.query_weight")):
                parameter.normal_(std=0.3)
    model.adapter.to(dtype)
    return model.eval()


def text(rng, length):
    return rng.choice([*range(13, 130), 10, 10, 10, 10, 10, 10, 10, 7], length).tolist()


def chat(seed=0, turns=3, answer=9):
    """Plain text, then messages with answers."""
    rng = np.random.default_rng(seed)
    ids = text(rng, int(rng.integers(10, 50)))
    for _ in range(turns):
        ids += [
            3,
            4,
            *text(rng, int(rng.integers(2, 30))),
            6,
            7,
            3,
            5,
            *rng.integers(13, 130, answer).tolist(),
            6,
            7,
        ]
    return torch.tensor([ids])


def test_it_is_a_causal_model_of_its_own():
    model = sentence_model()
    assert isinstance(model, CausalModel) and not isinstance(model, Attached)


def test_text_has_the_logits_of_the_pretrained_model_bit_for_bit():
    model = sentence_model(torch.float32)
    ids = torch.tensor([text(np.random.default_rng(1), 90)])
    assert torch.equal(model(ids)[0], model.attached(ids)[0])
    assert len(model.stored(model(ids)[1])[0]) > 3


def test_what_is_stored_is_every_sentence_of_text_and_messages():
    model = sentence_model()
    ids = [
        20,
        21,
        22,
        10,
        30,
        31,
        10,
        40,
        41,
        42,
        43,
        10,
        3,
        4,
        50,
        51,
        52,
        6,
        7,
        3,
        5,
        60,
        61,
        10,
        62,
        63,
        6,
        7,
    ]
    stored = model.stored(model(torch.tensor([ids]))[1])[0]
    assert [each.tokens for each in stored] == [
        [20, 21, 22, 10],
        [30, 31, 10],
        [40, 41, 42, 43, 10],
        [50, 51, 52],
    ]
    assert [ids[each.start : each.end] for each in stored] == [each.tokens for each in stored]


def test_a_full_stop_behind_an_initial_ends_no_sentence():
    model = sentence_model()
    ids = [20, 21, 95, 10, 30, 31, 10, 40, 41, 96, 11, 50, 51, 52, 10, 60]
    for cut in range(1, len(ids)):
        state = model(torch.tensor([ids[:cut]]))[1]
        stored = model.stored(model(torch.tensor([ids[cut:]]), state)[1])[0]
        assert [each.tokens for each in stored] == [ids[:7], ids[7:11], ids[11:15]]


@pytest.mark.parametrize(
    ("text", "shortened"),
    [
        (" J", True),
        ("J", True),
        (" Dr", True),
        (" e", True),
        (" I", False),
        ("g", False),
        (" Drum", False),
        (" 7", False),
    ],
)
def test_initials_and_titles(text, shortened):
    assert is_shortened(text) == bool(shortened)


def test_a_long_sentence_is_cut_and_a_short_one_joined():
    model = sentence_model()
    ids = [20, 10, 30, 31, 32, 10, *range(40, 60), 10, 70]
    stored = [each.tokens for each in model.stored(model(torch.tensor([ids]))[1])[0]]
    assert [token for each in stored for token in each] == ids[:-1]  # the last sentence is open
    assert stored[0] == [20, 10, 30, 31, 32, 10] and max(map(len, stored)) == SETTINGS.longest


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_computed_from_what_it_recalls(seed):
    """The oracle: one call of the pretrained model on the context, the recalled sentences and the answer, with a mask
    for the window and the adapter on the last two. (First tokens that stay visible have distances of their own.)
    """
    model = sentence_model(sinks=0)
    ids = chat(seed, turns=1, answer=8)[0].tolist()
    start = len(ids) - 10  # the answer's first token
    with torch.no_grad():
        state = model(torch.tensor([ids[:start]]))[1]
        logits = model(torch.tensor([ids]))[0][0]
        found = model.stored(state)[0]
        place = Position(*state.blocks[-1].scan[0, :-1].tolist())
        asked = [
            place.question_end - min(SETTINGS.query, place.question_end - place.question_start),
            place.question_end,
        ]
        with own_masks(model):
            inputs = model.base.model(
                torch.tensor([ids[:start]]), output_hidden_states=True, **mask_of(start)
            )
        states = model.encoder.features([inputs.hidden_states[n][0] for n in SETTINGS.layers])
        encode = lambda a, b, query: model.encoder(
            states[None, a:b], torch.ones(1, b - a, dtype=torch.bool), query=query
        )[0]
        keys = torch.stack([encode(each.start, each.end, False) for each in found])
        usable = [n for n, each in enumerate(found) if each.end <= asked[0]]
        best = sorted(usable, key=lambda n: -float(keys[n] @ encode(*asked, True)))[: SETTINGS.recalled]
        block = recalled_context(FORMAT, vocabulary(), [found[n].tokens for n in sorted(best)])
        together = ids[:start] + block + ids[start:-2]
        with_adapter = torch.zeros(len(together), 1, dtype=torch.float64)
        with_adapter[start:] = 1
        wanted = adapted(model, torch.tensor([together]), with_adapter)[0]
    torch.testing.assert_close(
        logits[start - 1 : start + 7], wanted[start + len(block) - 1 : -1], atol=1e-10, rtol=0
    )


@contextmanager
def own_masks(model):
    """The pretrained model without a window, for calls with a mask."""
    window, model.attached.window = model.attached.window, None
    yield
    model.attached.window = window


def mask_of(length):
    place = torch.arange(length)
    back = place[:, None] - place
    return {"attention_mask": ((back >= 0) & (back < WINDOW))[None, None]}


def adapted(model, ids, weight):
    """Logits with the low-rank update, at the tokens where `weight` is one."""
    handles = []
    for path, module in model.base.model.layers.named_modules():
        name = path.replace(".", "_")
        if name in model.adapter.down:
            change = lambda _, given, out, name=name: (
                out + 2 * weight * (given[0] @ model.adapter.down[name] @ model.adapter.up[name])
            )
            handles.append(module.register_forward_hook(change))
    with own_masks(model):
        logits = model.base(ids, **mask_of(ids.shape[1])).logits
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["on", "frozen", "fresh", "off"])
def test_whole_is_any_split(seed, mode):
    model, ids = sentence_model(), chat(seed)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        whole, last = model(ids, memory_mode=mode)
        for cuts in (
            range(1, ids.shape[1]),
            sorted(rng.choice(range(1, ids.shape[1]), 5, replace=False).tolist()),
        ):
            state, parts = None, []
            for a, b in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
                logits, state = model(ids[:, a:b], state, memory_mode=mode)
                parts.append(logits)
            torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=0)
            for (name, x), (_, y) in zip(named(state), named(last), strict=True):
                torch.testing.assert_close(x, y, atol=1e-10, rtol=0, msg=name)


def named(state):
    own = state.blocks[-1]
    return [(name, x) for name, x in zip(own._fields, own, strict=True) if name not in ("pending", "answer")]


def test_rows_are_isolated():
    model = sentence_model()
    rows = [chat(seed, turns=2)[0] for seed in range(3)]
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])
    mask = torch.stack([torch.arange(longest) < len(row) for row in rows])
    with torch.no_grad():
        together, state = model(ids, mask=mask)
        packed, state2 = model(torch.cat(rows)[None], offsets=np.cumsum([0, *map(len, rows)]).tolist())
        for n, row in enumerate(rows):
            alone, own = model(row[None])
            torch.testing.assert_close(together[n, : len(row)], alone[0], atol=1e-10, rtol=0)
            for found in (state, state2):
                assert model.stored(found.rows([n])) == model.stored(own)
        torch.testing.assert_close(packed[0, : len(rows[0])], together[0, : len(rows[0])], atol=1e-10, rtol=0)


def test_causal():
    model, ids = sentence_model(), chat(5)
    with torch.no_grad():
        before = model(ids)[0]
        for place in range(4, ids.shape[1], 7):
            changed = ids.clone()
            changed[0, place] = 131
            torch.testing.assert_close(model(changed)[0][:, :place], before[:, :place], atol=1e-10, rtol=0)


def test_an_answer_without_a_message_recalls_nothing():
    model = sentence_model()
    ids = [*chat(3)[0].tolist(), *range(20, 60), 3, 5]
    with torch.no_grad():
        state = model(torch.tensor([ids]))[1]
        block = recalled_context(FORMAT, vocabulary(), [])
        assert int(state.blocks[-1].answer.position) == len(ids) + len(block)


def test_modes():
    model, ids = sentence_model(), chat(2)
    with torch.no_grad():
        frozen, off = model(ids, memory_mode="frozen"), model(ids, memory_mode="off")
        assert model.stored(frozen[1]) == [[]] == model.stored(off[1])
        assert torch.equal(off[0], model.attached(ids)[0])
        assert not torch.allclose(frozen[0], off[0])  # the adapter still acts in answers
        assert not torch.allclose(frozen[0], model(ids)[0])


def test_a_state_from_a_file_goes_on_within_an_answer(tmp_path):
    model, ids = sentence_model(torch.float32), chat(3)
    start = int((ids[0] == 5).nonzero()[-1]) + 4  # some tokens into the last answer
    with torch.no_grad():
        whole = model(ids)[0]
        state = model(ids[:, :start])[1]
        assert state.blocks[-1].answer is not None
        memfile.save(tmp_path / "m.mem", model, state)
        loaded = memfile.load(tmp_path / "m.mem", model)
        assert loaded.blocks[-1].answer is None
        rest = model(ids[:, start:], loaded)[0]
    torch.testing.assert_close(rest, whole[:, start:], atol=1e-5, rtol=1e-4)
    assert model.stored(loaded) == model.stored(state)


def test_damaged_counts_are_refused(tmp_path):
    model, ids = sentence_model(torch.float32), chat(3)
    state = model(ids)[1]
    own = state.blocks[-1]
    for wrong in (
        own._replace(length=own.length + 1), own._replace(spans=own.spans + 10**6), own._replace(scan=own.scan - 10**6),
        own._replace(ids=own.ids[:, :1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"do not agree|expected"):
            memfile.save(tmp_path / "m.mem", model, state._replace(blocks=(*state.blocks[:-1], wrong)))
        assert not (tmp_path / "m.mem").exists()


def test_an_open_sentence_can_be_stored():
    model = sentence_model()
    ids = [20, 21, 22, 10, 30, 31, 32]
    with torch.no_grad():
        state = model(torch.tensor([ids, [*ids[:4], 6, 3, 4]]))[1]
        closed = model.close_sentence(state)
        found = [[each.tokens for each in row] for row in model.stored(closed)]
        assert found == [[[20, 21, 22, 10], [30, 31, 32]], [[20, 21, 22, 10]]]
        after = model(torch.tensor([[10, 40, 41, 42, 6]]), closed.rows([0]))[1]
        assert [each.tokens for each in model.stored(after)[0]][-1] == [10, 40, 41, 42]
        again = model.close_sentence(closed)
        assert all(torch.equal(a, b) for a, b in zip(again.tensors(), closed.tensors(), strict=True))


def tensors_with(state, tokens):
    """The names of fields of integers in which these tokens follow each other."""
    found = []
    for name, tensor in memfile.named_tensors(state.saved()):
        if not tensor.is_floating_point():
            flat = tensor.flatten().tolist()
            if any(flat[n : n + len(tokens)] == tokens for n in range(len(flat))):
                found.append(name)
    return found


@pytest.mark.parametrize("where", ["text", "open answer"])
def test_of_a_removed_sentence_nothing_remains(where, tmp_path):
    """Whatever it was, the state is then the same: the tokens of a removed sentence, and of an answer that repeats it,
    leave no trace.
    """
    model = sentence_model(torch.float32)
    secret, other, after = [50, 51, 52, 53, 10], [70, 71, 72, 73, 10], [20, 21, 22, 10]

    def state_with(ids):
        text = [3, 4, *after, *ids, 6, 7, 3, 5, *ids[:4], *range(90, 94)]
        text += [6, 7] if where == "text" else []
        return model(torch.tensor([text]))[1]

    with torch.no_grad():
        states = [state_with(secret), state_with(other)]
        assert tensors_with(states[0], secret[:3])
        kept = [model.without(state, [1]) for state in states]
        assert not tensors_with(kept[0], secret[:3])
        assert [each.tokens for each in model.stored(kept[0])[0]] == [after]
        for (name, x), (_, y) in zip(*map(memfile.named_tensors, kept), strict=True):
            assert torch.equal(x, y), name
        memfile.save(tmp_path / "a.mem", model, kept[0])
        raw = (tmp_path / "a.mem").read_bytes()
        for kind in (np.int32, np.int64):
            assert np.array(secret[:3], kind).tobytes() not in raw


def test_after_a_removal_the_pretrained_model_reads_a_new_text():
    """A text has the logits that it has at the beginning, and answers recall the sentences that are left, also in
    calls of any length and from a file.
    """
    model, ids = sentence_model(), chat(1)
    with torch.no_grad():
        state = model(ids)[1]
        before = model.stored(state)[0]
        gone = {1, len(before) - 1}
        left = model.without(state, sorted(gone))
        assert model.stored(left)[0] == [s for n, s in enumerate(before) if n not in gone]
        plain = torch.tensor([[3, 4, 40, 41, 42, 10, *range(60, 90)]])
        logits, _ = model(plain, left)
        torch.testing.assert_close(logits, model(plain)[0], atol=1e-10, rtol=0)
        more = chat(8)
        whole, last = model(more, left)
        state, parts = left, []
        for start in range(0, more.shape[1], 5):
            logits, state = model(more[:, start : start + 5], state)
            parts.append(logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=0)
        assert not torch.allclose(whole, model(more)[0])  # answers still recall what is left
        for (name, x), (_, y) in zip(named(state), named(last), strict=True):
            torch.testing.assert_close(x, y, atol=1e-10, rtol=0, msg=name)
    with pytest.raises(ValueError, match="remove"):
        model.without(left, [len(before)])


def test_a_removal_within_a_message_leaves_the_rest_of_it():
    model = sentence_model()
    ids = [3, 4, 20, 21, 22, 10, 30, 31, 32, 10, 40, 41]
    with torch.no_grad():
        left = model.without(model(torch.tensor([ids]))[1], [0])
        assert [each.tokens for each in model.stored(left)[0]] == [[30, 31, 32, 10], [40, 41]]
        state = model(torch.tensor([[42, 43, 10, 6, 7, 3, 5, 60, 61]]), left)[1]
        place = Position(*state.blocks[-1].scan[0, :-1].tolist())
        assert (place.question_start, place.question_end) == (12, 15)
        assert state.blocks[-1].answer is not None


def test_the_oldest_sentences_are_dropped_when_the_store_is_full():
    model = sentence_model(size=5)
    ids = torch.tensor([text(np.random.default_rng(0), 200)])
    everything = sentence_model(size=1000)
    with torch.no_grad():
        assert model.stored(model(ids)[1])[0] == everything.stored(everything(ids)[1])[0][-5:]


def test_a_search_finds_a_stored_message():
    model, ids = sentence_model(), chat(4)
    with torch.no_grad():
        model.encoder.query.copy_(model.encoder.key)
        model.encoder.query_weight.copy_(model.encoder.key_weight)
        state = model(ids)[1]
        found = model.search(state, [40, 41, 42, 10])[0]
    assert sorted(n for n, _ in found) == list(range(len(model.stored(state)[0])))
    assert all(a >= b for (_, a), (_, b) in pairwise(found))


# Generation and sessions.


def test_generation_is_greedy_decoding_by_hand():
    model, ids = sentence_model(), chat(6, turns=2)
    prompt = torch.cat([ids, torch.tensor([[3, 4, 50, 51, 52, 6, 7, 3, 5]])], 1)
    with torch.no_grad():
        logits, state = model(prompt)
        wanted = []
        for _ in range(10):
            wanted.append(int(logits[0, -1].argmax()))
            logits, state = model(torch.tensor([wanted[-1:]]), state)
        whole = model(torch.cat([prompt, torch.tensor([wanted])], 1))[0]
    assert whole[0, prompt.shape[1] - 1 : -1].argmax(-1).tolist() == wanted


def test_several_rows_generate_what_each_generates_alone():
    model = sentence_model(torch.float32)
    own = ByteTokenizer()
    states = [model(chat(n)[:, : 30 + 9 * n])[1] for n in range(3)]
    prompts = ["abc", "hello", "x"]
    settings = Sampling(max_tokens=6, temperature=0.0)
    run = lambda prompt, state: Generation(model, prompt, settings, tokenizer=own, state=state).run().texts
    joined = type(states[0]).concat(states)
    assert run(prompts, joined) == [run([p], s)[0] for p, s in zip(prompts, states, strict=True)]


def test_a_session_saves_and_loads(tmp_path):
    model = sentence_model(torch.float32)
    session = Session(model, ByteTokenizer())
    session.read("some text. and more text. and the last of it.")
    session.save(tmp_path / "s.mem")
    other = Session(model, ByteTokenizer()).load(tmp_path / "s.mem")
    assert model.stored(other.state) == model.stored(session.state)
    assert other.generate("a", temperature=0, max_tokens=5) == session.generate(
        "a", temperature=0, max_tokens=5
    )


# Training.


def rows_for_training(model, seed=0):
    rng = np.random.default_rng(seed)
    encode, decode = (lambda s: [ord(c) for c in s]), (lambda ids: "".join(map(chr, ids)))
    del rng
    items = [
        "abc def. ghi jkl. ", Exchange("xyz is uvw.", "ok"), "mno pqr. stu. ",
        Exchange("what is xyz?", "uvw", "question", ((1, "uvw"),)),
        Exchange("what is mno?", "pqr", "question", ((2, "pqr"),)),
        Exchange("who?", "no", "unknown"),
    ]  # fmt: skip
    return chat_row(model, encode, decode, items, 200)


def test_a_row_has_the_sentences_and_answers_that_the_model_sees():
    model = sentence_model(longest=30)
    row = rows_for_training(model)
    _, state = model(torch.from_numpy(row.tokens)[None])
    assert [(each.start, each.end) for each in model.stored(state)[0]] == row.sentences
    kinds = [question.kind for question in row.questions]
    assert kinds == ["chat", "question", "question", "unknown"]
    for question in row.questions:
        assert row.tokens[question.start : question.start + len(question.answer)].tolist() == question.answer
        state = model(torch.from_numpy(row.tokens[: question.start])[None])[1]
        place = Position(*state.blocks[-1].scan[0, :-1].tolist())
        assert place.part == ANSWER and place.question_end == question.query[1]


def test_the_training_loss_is_that_of_the_model():
    """The loss of an answer in training is the one that a call of the model has, if it recalls the same sentences."""
    model = sentence_model(sinks=0, longest=30)
    row = rows_for_training(model)
    with torch.no_grad(), own_masks(model):
        _, cache = read_rows(model, [row, row])
    for question in row.questions:
        start, ids = question.start, torch.from_numpy(row.tokens)[None]
        with torch.no_grad():
            state = model(ids[:, :start])[1]
            logits = model(ids)[0][0, start - 1 : start - 1 + len(question.answer)]
        found = recalled_of(model, state)
        block = recalled_context(FORMAT, vocabulary(), found)
        with torch.no_grad(), own_masks(model):
            nats, _ = _reading(model, [(1, question, block, question.answer)], cache)
        wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(question.answer), reduction="sum")
        torch.testing.assert_close(nats.double()[0], wanted, atol=2e-3, rtol=1e-4)  # logits in float32


def recalled_of(model, state):
    """The sentences in the context of the open answer."""
    own, place = state.blocks[-1], Position(*state.blocks[-1].scan[0, :-1].tolist())
    stored = model.stored(state)[0]
    length = min(SETTINGS.query, place.question_end - place.question_start)
    first = place.question_end - length
    read = int(state.position[0]) - int(own.scan[0, -1])
    hidden = own.hidden[0]
    offset = first - (read - len(hidden))
    query = model.encoder(
        hidden[None, offset : offset + length], torch.ones(1, length, dtype=torch.bool), query=True
    )[0]
    usable = [n for n, each in enumerate(stored) if each.end <= first]
    best = sorted(usable, key=lambda n: -float(own.keys[0, n].float() @ query.float()))[: SETTINGS.recalled]
    return [stored[n].tokens for n in sorted(best)]


def test_training_lowers_the_loss_and_leaves_the_pretrained_weights():
    model = sentence_model(torch.float32, longest=30, rank=16)
    rows: list[ChatRow] = [rows_for_training(model)]
    before = copy.deepcopy(model.base.state_dict())
    model.attached.window = None
    some = [p for _, p in model.saved_parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(some, lr=1e-2), []
    for step in range(90):
        found = answer_loss(model, rows, np.random.default_rng(step), answers=4, missed=0.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.reading + found.addressing)
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:5])
    assert all(torch.equal(x, before[name]) for name, x in model.base.state_dict().items())


def test_scan_positions_are_known():
    model = sentence_model()
    state = model(torch.tensor([[20, 21, 3, 5, 30, 6, 7, 3, 9, 40, 41]]))[1]
    assert state.blocks[-1].scan[0, 0].item() == OTHER  # a message of an unknown role
    state = model(torch.tensor([[40, 41, 6, 7, 3, 4, 9]]), state)[1]
    assert state.blocks[-1].scan[0, 0].item() == TEXT

"""Training rows of DNA are what the files hold; scores and Markov models equal their definitions, counted by hand."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.dna.alphabet import FIRST_LABEL, LABEL_QUERY, reverse_complement
from remanence.dna.labelled import Labelled
from remanence.dna.task import GenomeSource, LabelledSource, classification_scores, confusion
from remanence.tasks.markov import RECENT, Markov, Mixture

RNG = np.random.default_rng(0)
RECORDS = [RNG.integers(4, size=size).astype(np.uint8) for size in (900, 400, 9)]
STRANDS = [record.tobytes() for record in RECORDS] + [
    reverse_complement(record).tobytes() for record in RECORDS
]


def row_text(batch, row):
    """What a row reads and the base after it, without padding."""
    targets = batch.targets[row].numpy()
    count = int((targets >= 0).sum())
    assert (targets[count:] == -100).all()
    tokens = batch.tokens[row].numpy()
    assert (tokens[1:count] == targets[: count - 1]).all(), "a target is the next token"
    return np.append(tokens[:count], targets[count - 1]).astype(np.uint8).tobytes()


@pytest.mark.parametrize("both", [False, True])
def test_rows_are_places_of_the_genome(both):
    source = GenomeSource(RECORDS, 32, 8, 5, reverse_complement=both)
    again = GenomeSource(RECORDS, 32, 8, 5, reverse_complement=both)
    seen = Counter()
    for number in reversed(range(40)):
        batch = source.step(number)
        assert batch.begins is None and (batch.tokens == again.step(number).tokens).all()
        for row in range(8):
            text = row_text(batch, row)
            found = [index for index, strand in enumerate(STRANDS) if text in strand]
            assert found, "no stretch of the genome"
            seen[found[0]] += 1
    assert (max(seen) > 2) == both, "the other strand is read if asked for"
    assert seen[0] > seen[1] > seen[2], "a long record is read more often"


@pytest.mark.parametrize("both", [False, True])
def test_carried_rows_read_on_where_they_were(both):
    source = GenomeSource(RECORDS, 16, 4, 1, max_pieces=8, reverse_complement=both)
    assert source.pieces == 8
    texts = [b""] * 4
    for number in range(60):
        batch = source.step(number)
        for row in range(4):
            text = row_text(batch, row) if (batch.targets[row] >= 0).any() else b""
            if batch.begins[row]:
                texts[row] = text
            else:
                assert not text or text[0] == texts[row][-1], (
                    "a piece's first token was the last one's target"
                )
                texts[row] += text[1:]
            assert any(texts[row] in strand for strand in STRANDS)
    assert int(source.step(16).begins.sum()) == 1, "rows begin in turn"


def test_processes_share_the_rows():
    whole = GenomeSource(RECORDS, 16, 6, 2, max_pieces=4)
    parts = [GenomeSource(RECORDS, 16, 3, 2, rank, 2, max_pieces=4) for rank in range(2)]
    for number in range(9):
        halves = [part.step(number) for part in parts]
        assert (np.concatenate([half.tokens for half in halves]) == whole.step(number).tokens.numpy()).all()
        assert (np.concatenate([half.begins for half in halves]) == whole.step(number).begins.numpy()).all()


def labelled(count=10):
    sequences = [RNG.integers(5, size=int(size)).astype(np.uint8) for size in RNG.integers(3, 9, count)]
    return Labelled(sequences, [str(number % 3) for number in range(count)], ["x.csv: line 2"] * count)


@pytest.mark.parametrize(("weight", "both"), [(0.0, False), (0.25, False), (0.0, True)])
def test_every_epoch_asks_for_each_label_once(weight, both):
    data = labelled()
    source = LabelledSource(data, 100, 4, 3, weight=weight, reverse_complement=both)
    assert source.length == max(map(len, data.sequences)) + 1
    batches = [source.step(number) for number in range(5)]  # two epochs of ten
    found = []
    for batch in batches:
        for tokens, targets, row in zip(batch.tokens.numpy(), batch.targets.numpy(), range(4), strict=True):
            end = int(np.flatnonzero(tokens == LABEL_QUERY)[0])
            assert targets[end] >= FIRST_LABEL and (targets[end + 1 :] == -100).all()
            if weight:
                assert (targets[: end - 1] == tokens[1:end]).all() and targets[end - 1] == -100
                assert batch.weights[row, end] == 1 and (batch.weights[row, :end] == weight).all()
            else:
                assert (targets[:end] == -100).all() and batch.weights is None
            read = tokens[:end].astype(np.uint8)
            strands = (read, reverse_complement(read)) if both else (read,)
            own = [
                index
                for index, sequence in enumerate(data.sequences)
                if any(strand.tobytes() == sequence.tobytes() for strand in strands)
                and data.labels[index] == str(targets[end] - FIRST_LABEL)
            ]
            assert own, "a sequence with its label"
            found.append(own[0])
    assert sorted(found[:10]) == sorted(found[10:]) == list(range(10)) and found[:10] != found[10:]
    turned = sum(
        found_sequence.tobytes() != batch_row[: len(found_sequence)].astype(np.uint8).tobytes()
        for found_sequence, batch_row in zip(
            (data.sequences[index] for index in found),
            (row for batch in batches for row in batch.tokens.numpy()),
            strict=True,
        )
    )
    assert (0 < turned < 20) == both


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ValueError, match=r"data.length: expected at least 9, for x.csv: line 2, got 8"):
        LabelledSource(labelled()._replace(sequences=[np.zeros(8, np.uint8)] * 10), 8, 4, 0)
    with pytest.raises(ValueError, match=r"data.path: expected at least two labels, got only 'a'"):
        LabelledSource(labelled()._replace(labels=["a"] * 10), 100, 4, 0)
    with pytest.raises(ValueError, match=r"data.path: expected a sequence of at least two bases, got none"):
        GenomeSource([np.zeros(1, np.uint8)], 8, 2, 0)


# Scores


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_scores_equal_their_definitions(pairs):
    true, chosen = np.array(pairs).T
    found = classification_scores(confusion(true, chosen, 4))
    assert found["accuracy"] == pytest.approx((true == chosen).mean())
    # Gorodkin: the correlation of the two, each as one column of zeros and ones for every class.
    one_hot = [np.eye(4)[each] - np.eye(4)[each].mean(0) for each in (true, chosen)]
    both, first, second = (
        (a * b).sum() for a, b in ((0, 1), (0, 0), (1, 1)) for a, b in [(one_hot[a], one_hot[b])]
    )
    expected = both / np.sqrt(first * second) if first > 1e-9 and second > 1e-9 else 0.0
    assert found["mcc"] == pytest.approx(expected, abs=1e-9)
    of_classes = []
    for each in set(true) | set(chosen):
        hits = ((true == each) & (chosen == each)).sum()
        of_classes.append(2 * hits / ((true == each).sum() + (chosen == each).sum()))
    assert found["f1"] == pytest.approx(np.mean(of_classes))


def test_of_two_classes_the_coefficient_is_that_of_the_four_counts():
    for right_1, right_0, missed, wrong in product((0, 2, 7), repeat=4):
        if not right_1 + right_0 + missed + wrong:
            continue
        found = classification_scores(np.array([[right_0, wrong], [missed, right_1]]))["mcc"]
        sides = (right_1 + wrong) * (right_1 + missed) * (right_0 + wrong) * (right_0 + missed)
        expected = (right_1 * right_0 - wrong * missed) / np.sqrt(sides) if sides else 0.0
        assert found == pytest.approx(expected)


# Markov models


@pytest.mark.parametrize("order", [0, 1, 3])
def test_a_markov_model_counts(order):
    tokens = RNG.integers(5, size=400).astype(np.uint8)
    counts, expected = Counter(), []
    for place in range(400):
        word = tuple(tokens[max(0, place - order) : place + 1].tolist())
        if place < order or 4 in word:
            expected.append(2.0)
            continue
        total = sum(counts[(*word[:-1], base)] for base in range(4))
        expected.append(-np.log2((counts[word] + 0.5) / (total + 2)))
        counts[word] += 1
    assert Markov(order).bits(tokens) == pytest.approx(expected)


@given(st.lists(st.integers(0, 90), max_size=6), st.integers(0, 9))
def test_any_pieces_give_the_same_bits(cuts, seed):
    tokens = np.random.default_rng(seed).integers(5, size=90).astype(np.uint8)
    whole, pieces = Mixture((0, 2, 3)), Mixture((0, 2, 3))
    found = [pieces.bits(part) for part in np.split(tokens, sorted(cuts))]
    assert np.concatenate(found, 1) == pytest.approx(whole.bits(tokens))


def test_the_mixture_weighs_models_by_what_they_predicted_last():
    tokens = np.tile(np.array([0, 1, 2, 3, 3, 0, 1], np.uint8), 60)
    *single, mixed = Mixture((1, 4)).bits(tokens)
    for place in (5, 50, 419):
        recent = [bits[max(0, place - RECENT) : place].sum() for bits in single]
        shares = np.exp2(-np.array(recent))
        chance = (shares * np.exp2([-bits[place] for bits in single])).sum() / shares.sum()
        assert mixed[place] == pytest.approx(-np.log2(chance))
    assert mixed[-100:].mean() < single[0][-100:].mean() / 4, "the order that sees the period wins"


def test_orders_without_a_table_are_refused():
    with pytest.raises(ValueError, match="order: expected from 0 to 12, got 13"):
        Markov(13)

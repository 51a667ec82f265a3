"""DNA from the file to the number: a planted motif is learned, padding is inert, pieces of a genome are the genome."""

import gzip
import json
import math
import shutil
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from evaluations import measured

from remanence import Model, ModelConfig
from remanence.dna.alphabet import BASES, DnaTokenizer, base_tokens
from remanence.dna.evaluation import label_scores
from remanence.dna.task import classification_scores, confusion
from remanence.evaluate import Subject
from remanence.inference.reader import PIECE
from remanence.tasks.markov import Mixture
from remanence.train import DataConfig, OptimizerConfig, TrainConfig, fit
from remanence.train.checkpoint import checkpoints

MODEL = {
    "vocab_size": 32,
    "dim": 32,
    "num_layers": 1,
    "heads": 2,
    "ffn": 48,
    "window": 16,
    "segment": 16,
    "persistent": 2,
}
CPU = torch.device("cpu")


def shape(pattern="lmm"):
    return ModelConfig(**MODEL, pattern=(pattern,), memory={"heads": 2, "chunk": 8})


def text(tokens):
    return "".join(BASES[token] for token in tokens)


def genome(path, sizes=(3000,), seed=0):
    """Records in which every base depends on the one before."""
    rng, lines = np.random.default_rng(seed), []
    for number, size in enumerate(sizes):
        steps = rng.choice(4, size, p=[0.1, 0.7, 0.1, 0.1])
        lines += [f">record {number}", text(np.cumsum(steps) % 4)]
    raw = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def motifs(folder, counts, length=20, seed=0):
    """Sequences with and without a motif, in GUE's layout."""
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    for split, count in counts.items():
        lines = ["Sequence,Label"]
        for number in range(count):
            tokens = rng.integers(4, size=length - int(rng.integers(4)))
            if number % 2:
                at = rng.integers(len(tokens) - 6)
                tokens[at : at + 6] = base_tokens(b"GATTAC")
            lines.append(f"{text(tokens)},{'with' if number % 2 else 'without'}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


def training(data, steps, **fields):
    own = {"batch": 32, "log_every": 10, "save_every": 10**6, "device": "cpu", "seed": 0}
    optimizer = OptimizerConfig(lr=1e-2, warmup=10)
    return TrainConfig(
        **{**own, "model": shape(), "optimizer": optimizer, "data": data, "steps": steps, **fields}
    )


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A model that was taught a motif, and its data."""
    home = tmp_path_factory.mktemp("motif")
    data = motifs(home / "data", {"train": 2000, "dev": 100, "test": 200})
    fit(training(DataConfig(kind="dna", path=str(data), length=64, weight=0.0), 250), home / "run")
    return home / "run" / "model", data


@pytest.mark.slow
def test_a_planted_motif_is_learned_and_needs_the_memory(classifier):
    folder, data = classifier
    rows = measured(folder, "dna", ("on", "off", "frozen"), data=str(data))
    on, off = (rows.row("accuracy", memory=mode) for mode in ("on", "off"))
    assert on.count == 200 and on.interval[0] > 0.6 > 0.5, "above chance, and surely so"
    assert rows.value("MCC", memory="on") > 0.4
    assert off.value < on.value - 0.1, "an LMM without its memory mixes nothing"
    assert rows.row("taken for", memory="on", label="with", taken="without").detail


def test_the_rows_are_those_of_the_models_own_answers(classifier):
    folder, data = classifier
    model, rows = Model.load(folder).eval(), measured(folder, "dna", data=str(data))
    tokenizer, true, chosen = DnaTokenizer(("with", "without")), [], []
    for line in (data / "test.csv").read_text().splitlines()[1:]:
        sequence, label = line.split(",")
        logits, _ = model(torch.tensor([[*tokenizer.encode(sequence), 6]]))
        chosen.append(int(logits[0, -1, 7:9].argmax()))
        true.append(tokenizer.labels.index(label))
    expected = classification_scores(confusion(true, chosen, 2))
    for metric, name in (("accuracy", "accuracy"), ("MCC", "mcc"), ("F1", "f1")):
        assert rows.value(metric) == pytest.approx(expected[name])


def test_padding_is_inert_and_long_sequences_are_read_in_pieces(classifier):
    model = Model.load(classifier[0]).eval()
    subject, rng = Subject(CPU, network=model), np.random.default_rng(1)
    sequences = [
        rng.integers(5, size=size).astype(np.uint8) for size in (3, 40, PIECE - 1, PIECE, PIECE + 30)
    ]
    together = label_scores(subject, sequences, 2)
    for row, sequence in zip(together, sequences, strict=True):
        with torch.no_grad():
            logits, _ = model(torch.tensor([[*sequence.tolist(), 6]]))
        assert torch.allclose(row, logits[0, -1, 7:9].log_softmax(-1), atol=1e-4)


def test_both_strands_are_the_mean_of_each(classifier):
    folder, data = classifier
    table = data / "palindromes.csv"
    table.write_text("seq,label\nACGT,with\nGAATTC,without\nAAATTT,with\n")
    alone, both = (
        measured(folder, "dna", data=str(table), reverse_complement=each) for each in ("false", "true")
    )
    assert alone.value("accuracy") == both.value("accuracy"), "what is its own other strand has one answer"
    some = measured(folder, "dna", data=str(data), samples="10", rows="3")
    assert some.row("accuracy").count == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seq,label\nACGT,neither\n",
            r"x.csv: line 2: expected one of the model's labels \(with, without\), got 'nei",
        ),
        (
            "seq,label\nACPT,with\n",
            "x.csv: line 2: sequence: expected the letters of DNA, got 'P', as in a protein",
        ),
    ],
)
def test_data_that_the_model_does_not_know_is_refused(classifier, tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        measured(classifier[0], "dna", data=str(tmp_path / "x.csv"))


def test_a_model_without_labels_is_refused(tmp_path):
    torch.manual_seed(0)
    Model(shape()).save(tmp_path)
    with pytest.raises(
        ValueError,
        match="model: expected a DNA classifier, got another model; train one with `remanence train dna/cl",
    ):
        measured(tmp_path, "dna", data="x.csv")
    DnaTokenizer().save(tmp_path)
    with pytest.raises(ValueError, match="got a DNA model without labels"):
        measured(tmp_path, "dna", data="x.csv")


# Genomes


@pytest.fixture
def reader(tmp_path):
    torch.manual_seed(0)
    Model(shape()).save(tmp_path / "model")
    DnaTokenizer().save(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def plain(model, tokens):
    """Losses token after token."""
    found, state = [], None
    for token, target in pairwise(tokens):
        logits, state = model(torch.tensor([[token]]), state)
        found.append(float(F.cross_entropy(logits[0], torch.tensor([target]))))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["on", "off", "frozen", "fresh"])
def test_a_genome_in_pieces_is_a_genome_token_by_token(reader, tmp_path, mode, monkeypatch):
    monkeypatch.setattr("remanence.evaluate.subject.PIECE", 64)
    path = genome(tmp_path / "x.fna.gz", (150, 70))
    rows = measured(reader, "lm", (mode,), data=str(path), views="stream", every="50")
    rows.model.memory_mode = mode
    expected = []
    for line in gzip.decompress(path.read_bytes()).decode().splitlines()[1::2]:
        expected += plain(rows.model, DnaTokenizer().encode(line))
    bits = np.array(expected) / math.log(2)
    assert rows.value("bits per base", view="stream") == pytest.approx(bits.mean(), rel=1e-5)
    for start in range(0, 218, 50):
        row = rows.row("bits by place", **{"from": start})
        assert row.value == pytest.approx(bits[start : start + 50].mean(), rel=1e-5)
        assert row.count == len(bits[start : start + 50])


def test_markov_models_stand_beside_the_model(reader, tmp_path):
    path = genome(tmp_path / "x.fa", (900,))
    tokens = np.array(DnaTokenizer().encode(path.read_text().splitlines()[1]))
    rows = measured(reader, "lm", data=str(path), views="markov", orders="0,2", every="300", max_tokens="700")
    expected = Mixture((0, 2)).bits(tokens[:700])[:, 1:]
    for name, bits in zip(("0", "2", "mixture"), expected, strict=True):
        own = [row for row in rows if row.setting.get("order") == name]
        assert own[0].value == pytest.approx(bits.mean()) and own[0].count == 699
        assert [row.value for row in own[1:]] == pytest.approx(
            [bits[at : at + 300].mean() for at in (0, 300, 600)]
        )
    assert expected[1].mean() < 1.5 < expected[0].mean(), "each base depends on the one before"


def test_markov_is_of_dna_alone(tmp_path):
    torch.manual_seed(0)
    Model(ModelConfig(**{**MODEL, "vocab_size": 257}, pattern=("window",))).save(tmp_path / "m")
    (tmp_path / "x.txt").write_text("some text")
    with pytest.raises(
        ValueError, match=r"lm\.views: expected markov with a model of DNA, got a model of text"
    ):
        measured(tmp_path / "m", "lm", data=str(tmp_path / "x.txt"), views="markov")
    with pytest.raises(ValueError, match=r"orders: expected at most 12, got 13"):
        measured(tmp_path / "m", "lm", data=str(tmp_path / "x.txt"), orders="13")


def test_a_protein_is_refused_with_its_line(reader, tmp_path):
    (tmp_path / "x.faa").write_text(">x\nACGT\nMVLSPADKT\n")
    with pytest.raises(ValueError, match=r"x\.faa: line 3: expected bases .*, got 'L', as in a protein"):
        measured(reader, "lm", data=str(tmp_path / "x.faa"))


# Training


def losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.parametrize("kind", ["genome", "dna"])
def test_resuming_is_not_stopping(tmp_path, kind):
    path = genome(tmp_path / "x.fa") if kind == "genome" else motifs(tmp_path / "d", {"train": 30})
    data = DataConfig(kind=kind, path=str(path), length=32, reverse_complement=True)
    setting = training(data, 9, carry=kind == "genome", batch=4, save_every=3, keep=9, log_every=1)
    fit(setting, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for later in checkpoints(tmp_path / "part" / "checkpoints")[1:]:
        shutil.rmtree(later)
    (tmp_path / "part" / "metrics.jsonl").write_text("")
    fit(None, tmp_path / "part", resume=True)
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "part") == {step: expected[step] for step in range(4, 10)}
    changed = path if kind == "genome" else path / "train.csv"
    changed.write_text(changed.read_text() + ("ACGT\n" if kind == "genome" else "AA,with\n"))
    with pytest.raises(ValueError, match="data: expected the corpus that the run began with"):
        fit(None, tmp_path / "part", resume=True)


def test_a_genome_is_learned_beyond_the_frequencies_of_its_bases(tmp_path):
    data = DataConfig(kind="genome", path=str(genome(tmp_path / "x.fa.gz", (4000, 50))), length=48)
    fit(training(data, 60, batch=8), tmp_path / "run")
    chain = -(0.7 * math.log(0.7) + 3 * 0.1 * math.log(0.1))
    last = np.mean([losses(tmp_path / "run")[step] for step in (40, 50, 60)])
    assert chain - 0.1 < last < 1.1 < math.log(4), "no better than the chain allows, but for chance"


def test_a_genome_of_any_names_is_found_and_what_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data.path: expected a FASTA file or a folder of them, got none"):
        fit(training(DataConfig(kind="genome"), 1), tmp_path / "run")
    (tmp_path / "g").mkdir()
    genome(tmp_path / "g" / "a.fna.gz", (100,))
    genome(tmp_path / "g" / "b.fasta", (100,), seed=1)
    fit(
        training(DataConfig(kind="genome", path=str(tmp_path / "g"), length=16), 1, batch=2), tmp_path / "run"
    )
    small = ModelConfig(**{**MODEL, "vocab_size": 8}, pattern=("window",))
    with pytest.raises(ValueError, match=r"model.vocab_size: expected at least the tokenizer's 32, got 8"):
        fit(training(DataConfig(kind="genome", path=str(tmp_path / "g")), 1, model=small), tmp_path / "other")
    assert not (tmp_path / "other").exists() or not any((tmp_path / "other").iterdir())


# The commands


def test_from_a_genome_to_classes_at_the_command_line(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    genome(Path("g.fna.gz"), (2000,))
    motifs(Path("d"), {"train": 64, "test": 20})
    small = [
        "--model.dim=32",
        "--model.num_layers=1",
        "--model.heads=2",
        "--model.ffn=32",
        "--model.memory.head_dim=16",
    ]
    small += ["--batch=4", "--device=cpu", "--optimizer.warmup=2"]
    command(
        "train",
        "dna/pretrain",
        "--data.path=g.fna.gz",
        "--out",
        "g",
        "--steps=4",
        "--data.length=128",
        *small,
    )
    begun = Model.load("g/model").embed.weight
    args = [
        "--data.path=d",
        "--out",
        "c",
        "--steps=1",
        "--optimizer.lr=1e-9",
        "--init_from=g/model",
        *small[5:],
    ]
    command("train", "dna/classify", *args)
    assert torch.allclose(Model.load("c/model").embed.weight, begun, atol=1e-6), (
        "it began from the genome's model"
    )
    said = command("eval", "c/model", "dna", "--dna.data=d", "--memory-mode", "on", "off", "--json", "c.json")
    assert "accuracy" in said and "MCC" in said and "F1" in said
    rows = json.loads(Path("c.json").read_text())["rows"]
    assert {row["setting"]["memory"] for row in rows} == {"on", "off"}
    views = ["--lm.views=stream,markov", "--lm.orders=2", "--lm.every=500"]
    said = command("eval", "g/model", "lm", "--lm.data=g.fna.gz", *views, "--json", "g.json")
    assert "bits per base" in said and "g.lm-places.png" in said.replace("\n", "")
    assert Path("g.lm-places.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.fa", "", "empty.fa: expected FASTA records, got an empty file"),
        (
            "p.faa",
            ">x\nMKLV\n",
            "p.faa: line 2: expected bases (ACGTN, U or ambiguity codes), got 'L', as in a protein",
        ),
        (
            "t.fa",
            "ACGT\n",
            "t.fa: line 1: expected a header that begins with '>', got a line that begins with 'A'",
        ),
    ],
)
def test_bad_files_are_one_line_and_leave_nothing(tmp_path, command, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    told = command("train", "dna/pretrain", f"--data.path={name}", "--out", "run", "--device=cpu", code=2)
    assert told.endswith(f"{message}\n") and told.count("\n") == 1
    assert not Path("run").exists() or not any(Path("run").iterdir())


def test_a_model_of_text_cannot_begin_a_classifier(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command("new", "tiny", "m")
    motifs(Path("d"), {"train": 8})
    told = command(
        "train", "dna/classify", "--data.path=d", "--init_from=m", "--out", "c", "--device=cpu", code=2
    )
    assert "init_from: expected data with the tokens of" in told


def test_lower_case_and_windows_lines_train_the_same(tmp_path):
    path = genome(tmp_path / "x.fa", (600,))
    other = tmp_path / "y.fa"
    other.write_bytes(path.read_text().lower().replace("\n", "\r\n").encode())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each, out in ((path, "a"), (other, "b")):
            data = DataConfig(kind="genome", path=str(each), length=32)
            fit(training(data, 2, batch=2, log_every=1), tmp_path / out)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")

"""The experiment on a kNN store in a pretrained model: its own reading of the model, its store, and a whole run."""

import importlib
import json
import lzma
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

import remanence


@pytest.fixture
def bench():
    return importlib.import_module("experiments.knn.attached")


@pytest.fixture
def folder(tmp_path):
    """A pretrained model with a window of its own length."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=61, max_position_embeddings=8192, num_key_value_heads=2, **shape)
    config.initializer_range, config.tie_word_embeddings = 0.3, True
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def base(bench, folder):
    return bench.Base(str(folder), "cpu", torch.float32)


def text(length, seed=0):
    return torch.randint(61, (length,), generator=torch.Generator().manual_seed(seed))


def opened(bench, base, **fields):
    """A store that changes the output."""
    torch.manual_seed(1)
    reader = bench.Reader(base, bench.Setting(layer=2, **fields))
    with torch.no_grad():
        reader.gate.fill_(0.5)
        reader.threshold.fill_(0.0)
        reader.log_scale.fill_(1.0)
    return reader


def test_it_reads_like_the_library(bench, base, folder):
    tokens = text(1300)
    attached = remanence.attach(folder, kind="knn", window=bench.WINDOW, layers=(2,)).model.eval()
    with torch.no_grad():
        wanted = attached.trace(tokens[None], memory_mode="off").hidden
    torch.testing.assert_close(base.rms(base.below(tokens[None], 3), base.norm), wanted, rtol=1e-4, atol=1e-4)


def test_full_attention_is_the_pretrained_models(base, folder):
    tokens = text(700)
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(folder)(tokens[None]).logits[0, :-1]
    wanted = nn.functional.cross_entropy(logits, tokens[1:], reduction="none") / math.log(2)
    torch.testing.assert_close(base.full(tokens), wanted, rtol=1e-4, atol=1e-4)


def test_a_closed_gate_and_an_empty_store_change_nothing(bench, base):
    tokens = text(1400)
    x = base.below(tokens[None], 2)[0]
    window = base.bits(base.below(tokens[None, :-1], 3)[0], tokens[1:])
    closed, reader = bench.Reader(base, bench.Setting(layer=2, opened=0.0)), opened(bench, base)
    torch.testing.assert_close(bench.measured(closed, tokens, x, 8192, 32), window)
    torch.testing.assert_close(bench.measured(reader, tokens, x, 0, 32), window)
    changed = bench.measured(reader, tokens, x, 8192, 32)
    torch.testing.assert_close(changed[: bench.WINDOW], window[: bench.WINDOW])
    assert (changed - window)[bench.WINDOW + 1 :].abs().max() > 1e-3


def test_a_store_holds_its_newest_entries_up_to_the_window(bench, base, monkeypatch):
    reader, tokens, at = opened(bench, base), text(2000), 1800
    x = base.below(tokens[None], 2)[0]
    (k, _), seen = reader.entries(x[None], tokens[None]), []
    keep = lambda q, k, v, allowed: (
        seen.append((k, allowed)) or torch.zeros_like(q[..., :1]).expand(*q.shape[:-1], q.shape[-1] + 1)
    )
    monkeypatch.setattr(reader, "read_all", keep)
    bench.measured(reader, tokens, x, 600, 0)
    keys, allowed = seen[at // bench.WINDOW - 1]  # the segment from 1536 on; nothing is read in the first
    begin = 1536 - 600
    torch.testing.assert_close(keys[0, : 1400 - begin], k[0, begin:1400])
    assert allowed[0, at - 1536].nonzero().flatten().tolist() == list(range(at - bench.WINDOW - begin + 1))


def test_the_best_of_all_entries_are_all(bench, base):
    reader, tokens = opened(bench, base), text(1500)
    x = base.below(tokens[None], 2)[0]
    every, best = (bench.measured(reader, tokens, x, 8192, k) for k in (0, 4096))
    torch.testing.assert_close(every, best, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("search", ["dense", "top"])
def test_a_chunk_reads_what_the_document_reads(bench, base, search):
    reader, tokens = opened(bench, base), text(2600)
    corpus = bench.Corpus(base, [("one", tokens.numpy())], 2, 10**6, 10**6)
    chunks = bench.Chunks([corpus], 1024, 2048, np.random.default_rng(0))
    first, x, targets, sinks, past, ids, place = chunks.draw(1)
    q, (k, v) = reader.queries(x), reader.entries(past, ids)
    last = first.unsqueeze(-1) + torch.arange(x.shape[1]) - bench.WINDOW
    with torch.no_grad():
        if search == "dense":
            y = reader.read_all(
                q, k, v, (place.unsqueeze(1) >= 0) & (place.unsqueeze(1) <= last.unsqueeze(-1))
            )
        else:
            y = reader.read_top(q, k, v, last, 4096, place)
        y = reader.above(x, first, sinks, reader.output(y))
        bits = base.losses(y[0], targets[0]) / math.log(2)
    start = int(first)
    wanted = bench.measured(reader, tokens, corpus.hidden[0], 8192, 0)
    found, wanted = bits[bench.WINDOW :], wanted[start + bench.WINDOW : start + 1024]
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)  # but for the entry before the first


def test_documents_of_code_are_in_the_order_of_their_imports(tmp_path):
    documents = importlib.import_module("experiments.knn.documents")
    filler = "\n".join(f"value_{n} = compute_something_of_some_length(argument_{n})" for n in range(9))
    files = {"__init__": "from .a import x", "a": "from . import b\nfrom p.c import y", "b": "import p.c", "c": "",
             "tests/test_a": "import p.a"}  # fmt: skip
    for name, code in files.items():
        path = tmp_path / "p" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{code}\n{filler}\nname = {name!r}\n")
    assert [name for name, _ in documents.modules(tmp_path / "p")] == ["p.c", "p.b", "p.a", "p"]
    seen = set()
    [(_, kept)] = documents.packages([tmp_path], held=False, seen=seen, most=10**6)
    assert kept.count("# p") == 1, "copies are left out"


def test_a_whole_run(bench, folder, tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    cache.mkdir()
    for part, count in (("train", 2), ("test", 2)):
        tokens = np.concatenate([text(4000, seed).numpy().astype(np.uint16) for seed in range(count)])
        (cache / f"code-{part}.u16.xz").write_bytes(lzma.compress(tokens.tobytes()))
        index = [[f"{part}{n}", 4000 * n, 4000] for n in range(count)]
        (cache / f"code-{part}.json").write_text(json.dumps(index))
    words = json.dumps([chr(65 + n % 26) * (1 + n % 3) for n in range(61)])
    (cache / "vocabulary.json.xz").write_bytes(lzma.compress(words.encode()))
    out = tmp_path / "rows.json"
    options = ["--cache", cache, "--out", out, "--rows", 2, "--chunk", 1024, "--near", 2048, "--near-docs", 2, "--far",
               3000, "--far-docs", 1, "--every", 1, "--sizes", 512, 1024, "--far-sizes", 2048, "--weights", tmp_path,
               "--runs", "layer=2,steps=2,memory=1024,controls=1,far=1",
               "layer=1,steps=1,memory=512,search=top,lora=2"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["attached", str(folder), *map(str, options)])
    bench.main()
    assert "won back" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    stores = [
        row["what"]["store"]
        for row in rows
        if row["what"]["arm"] == "store" and row["what"]["reach"] == "near"
    ]
    assert stores == ["512", "1024", "all of 1024", "another's 1024", "512", "1024", "0"]
    assert {row["what"]["arm"] for row in rows} == {"window", "full", "store"}
    assert len(list(tmp_path.glob("*.pt"))) == 2

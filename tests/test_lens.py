"""The lens: what the page says is what the model did, every text is shown as it is, and every wrong turn is one
line.
"""

import bz2
import gzip
import json
import lzma
import re
from threading import Thread

import numpy as np
import pytest
import torch
from browser import Browser, executable
from models import MEMORIES, model

from remanence import Session, cli
from remanence.cli.sessions import Lens
from remanence.lens import (
    SIGNALS,
    Page,
    Recording,
    memory_layers,
    nearest_values,
    piece_length,
    record,
    unpack,
    weight_norms,
)
from remanence.lens.recording import ValueHistory
from remanence.memory.observation import observing_memories
from remanence.testing import assert_close
from remanence.tokenizers.tokens import read_tokenizer

TEXT = "All happy families are alike; every unhappy family is unhappy in its own way. "
ODD = (
    "a <b>bold</b> </script><script>alert(1)</script> &amp; “naïve” 東京 🧲\u2028\r\n\x00 end <!-- {title} -->\n"
    * 3
)


def plainly(answers, values, reach, kept):
    """`nearest_values`, one answer after the other."""
    found = []
    first = values.shape[1] - answers.shape[1]
    for head in range(answers.shape[0]):
        for t in range(answers.shape[1]):
            scores = [
                (float(answers[head, t] @ values[head, i]), first + t - i)
                for i in range(max(0, first + t - reach), first + t)
            ]
            best = sorted(scores, reverse=True)[:kept]
            found.append(best + [(0.0, 0)] * (kept - len(best)))
    shape = (answers.shape[0], answers.shape[1], kept, 2)
    return torch.tensor(found, dtype=torch.float64).view(shape).transpose(0, 1)


@pytest.mark.parametrize(
    ("before", "count", "reach"),
    [(0, 1, 5), (0, 7, 100), (0, 200, 70), (300, 70, 64), (300, 70, 1000), (3, 200, 1)],
)
def test_matches_are_those_of_a_plain_search(before, count, reach):
    values = torch.nn.functional.normalize(torch.randn(2, before + count, 8, dtype=torch.float64), dim=-1)
    answers = torch.nn.functional.normalize(torch.randn(2, count, 8, dtype=torch.float64), dim=-1)
    distance, cosine = nearest_values(answers, values, reach)
    expected = plainly(answers, values, reach, 3)
    assert_close(cosine, expected[..., 0], 1e-12)
    assert torch.equal(distance.double(), expected[..., 1])


def test_the_past_does_not_grow():
    past = ValueHistory(2, 4, 10, torch.zeros(1))
    for _ in range(5):
        past.match(torch.randn(7, 2, 4), torch.randn(7, 2, 4))
        assert past.values.shape[1] <= 10


@pytest.mark.parametrize(
    "variant", [name for name, pattern in MEMORIES.items() if set(pattern) - {"knn", "window"}]
)
def test_what_is_seen_in_pieces_is_what_the_model_does(variant):
    """Against one call over the whole text: gates, surprise, the norm at the end, and a plain search among all
    values.
    """
    subject = model(variant, vocab_size=257)
    session = Session(subject)
    seen = list(record(session, [TEXT[:50].encode(), TEXT[50:]], step=12, reach=40))
    tokens = torch.tensor([list(TEXT.encode())])
    layers = memory_layers(subject)
    shown = {index: [] for index in layers}
    numbers = {layer: index for index, layer in layers.items()}
    observer = lambda layer, values, predictions: shown[numbers[layer]].append((values, predictions))
    with torch.no_grad(), observing_memories(observer):
        whole = subject.trace(tokens)
    signals = torch.cat([part.signals for part in seen])
    assert signals.shape == (len(TEXT), len(shown), len(SIGNALS))
    for place, index in enumerate(shown):
        there = whole.traces[index]
        assert_close(signals[:, place, 0].double(), there.surprise[0].mean(-1), 1e-5)
        keep = there.gates.log_keep
        expected = torch.full_like(there.surprise, torch.nan) if keep is None else keep
        assert_close(
            torch.cat([part.keep for part in seen])[:, place].double().nan_to_num(9),
            expected[0].nan_to_num(9),
            1e-5,
        )
        gates = (
            there.gates.log_step,
            there.gates.log_momentum,
            None if keep is None else torch.log(-torch.expm1(keep)),
        )
        for column, gate in enumerate(gates, 1):
            if gate is None:
                assert signals[:, place, column].isnan().all()
            else:
                assert_close(signals[:, place, column].double(), gate[0].exp().mean(-1), 1e-5)
        values, answers = (
            torch.cat(parts, 1)[0].transpose(0, 1) for parts in zip(*shown[index], strict=True)
        )
        values, answers = (torch.nn.functional.normalize(x, dim=-1) for x in (values, answers))
        expected = plainly(answers, values, 40, 3)
        assert_close(torch.cat([part.cosine for part in seen])[:, place].double(), expected[..., 0], 1e-4)
    assert_close(seen[-1].norm.double(), weight_norms(layers, whole.state).double(), 1e-5)
    assert [part.tokens_read for part in seen] == [*range(12, len(TEXT), 12), len(TEXT)]


def test_an_observer_sees_no_call_of_another_thread():
    subject, calls = model("lmm", vocab_size=257), []
    with observing_memories(lambda *call: calls.append(call)):
        thread = Thread(target=lambda: Session(subject).read(TEXT))
        thread.start()
        thread.join()
        assert not calls
        Session(subject).read(TEXT)
        assert calls


def test_the_stride_is_of_whole_chunks_and_gives_enough_norms():
    subject = model("lmm")
    for tokens in (1, 100, 5_000, 100_000, 10**9):
        step = piece_length(subject, tokens)
        assert step % 4 == 0 and 4 <= step <= 2048
        assert step == 2048 or tokens / step <= 256


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lens")
    cli.main(["new", "tiny", str(folder / "m"), "--variant", "mag+lmm"])
    cli.main(["new", "tiny", str(folder / "none"), "--variant", "window"])
    (folder / "t.txt").write_text(TEXT * 10)
    (folder / "odd.txt").write_text(ODD, encoding="utf-8", newline="")
    (folder / "bytes.txt").write_bytes(b"\xff\xfe cut: \xe2\x82")
    (folder / "empty.txt").write_text("")
    for packer in (lzma, gzip, bz2):
        ending = {lzma: "xz", gzip: "gz", bz2: "bz2"}[packer]
        (folder / f"t.txt.{ending}").write_bytes(packer.compress(TEXT.encode()))
    return folder


@pytest.fixture
def run(home, command, monkeypatch):
    monkeypatch.chdir(home)
    return lambda *arguments, **code: command("lens", *arguments, "--device", "cpu", **code)


def test_the_page_holds_the_models_own_numbers(run, home, tmp_path):
    said = run("m", "--text", "t.txt", "--out", tmp_path / "p.html")
    count = len(TEXT) * 10
    assert f"{count:,} tokens" in said and f"{(tmp_path / 'p.html').stat().st_size:,} bytes" in said
    page = unpack(tmp_path / "p.html")
    assert "".join(page.tokens) == TEXT * 10 and len(page.tokens) == count
    assert page.about["layers"] == ["layer 1 mag", "layer 2 lmm"]
    session = Session(home / "m")
    seen = list(record(session, [TEXT * 10], piece_length(session.model, count)))
    np.testing.assert_array_equal(page.signals, torch.cat([part.signals for part in seen]).numpy())
    np.testing.assert_array_equal(page.keep, torch.cat([part.keep for part in seen]).numpy())
    np.testing.assert_allclose(-np.expm1(page.keep).mean(-1), page.signals[..., 3], rtol=1e-4)
    np.testing.assert_array_equal(page.distance, torch.cat([part.distance for part in seen]).numpy())
    np.testing.assert_allclose(
        page.cosine, torch.cat([part.cosine for part in seen]).numpy(), atol=0.5 / 127 + 1e-6
    )
    np.testing.assert_allclose(
        page.about["norms"], torch.stack([part.norm for part in seen]).numpy(), rtol=1e-6
    )
    whole = session.model.trace(torch.tensor([list((TEXT * 10).encode())]))
    np.testing.assert_allclose(page.signals[..., 0].mean(1), whole.surprise[0].detach().numpy(), rtol=2e-3)
    assert page.about["ends"][-1] == count


def test_a_text_is_shown_as_it_is_and_cannot_break_out(run, tmp_path):
    run("m", "--text", "odd.txt", "--out", tmp_path / "p.html")
    source = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<b>bold" not in source and "alert(1)</script>" not in source
    assert source.count("<script") == source.count("</script>")
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?:""", source), (
        "the page needs nothing from elsewhere"
    )
    assert "".join(unpack(tmp_path / "p.html").tokens) == ODD
    run("m", "--text", "bytes.txt", "--out", tmp_path / "p.html")
    page = unpack(tmp_path / "p.html")
    assert len(page.tokens) == 10 and "".join(page.tokens) + page.about["rest"] == "\ufffd\ufffd cut: \ufffd"


def test_some_layers_alone_are_those_of_all(run, tmp_path):
    run("m", "--text", "t.txt", "--out", tmp_path / "all.html")
    run("m", "--text", "t.txt", "--out", tmp_path / "one.html", "--layers", 2)
    whole, one = unpack(tmp_path / "all.html"), unpack(tmp_path / "one.html")
    assert one.about["layers"] == ["layer 2 lmm"]
    for name in ("signals", "keep", "distance", "cosine"):
        np.testing.assert_array_equal(getattr(one, name), getattr(whole, name)[:, 1:])
    assert one.about["norms"] == [norm[1:] for norm in whole.about["norms"]]


def test_tokens_of_a_tokenizer_and_half_precision(tmp_path):
    """Text comes back whole from tokens that cut characters; a bfloat16 model is seen too."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [ODD, TEXT], tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    session = Session(model("mac", torch.bfloat16, vocab_size=300, memory={"net": "titans"}), tokenizer)
    with open(tmp_path / "p.html", "w", encoding="utf-8", newline="\n") as file:
        page = Page(file, tokenizer, "t")
        for seen in record(session, [ODD], 16):
            page.add(seen)
        page.finish("facts", ["layer 1", "layer 2"], [1.0, 1.0], 8, 4)
    found = unpack(tmp_path / "p.html")
    assert "".join(found.tokens) + found.about["rest"] == ODD and len(found.tokens) < len(ODD.encode())
    assert np.isfinite(found.signals).all() and np.abs(found.cosine).max() <= 1


def test_reading_begins_from_a_memory(run, tmp_path):
    session = Session("m")
    session.read(TEXT * 5)
    session.save(tmp_path / "s.mem")
    run("m", "--text", "t.txt", "--out", tmp_path / "after.html", "--memory-file", tmp_path / "s.mem")
    page = unpack(tmp_path / "after.html")
    seen = next(iter(record(session, [TEXT * 10], piece_length(session.model, len(TEXT) * 10))))
    np.testing.assert_array_equal(page.signals[: len(seen.tokens)], seen.signals.numpy())
    assert f"after {len(TEXT) * 5:,}" in page.about["facts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "--text", "t.txt"], "expected one with a neural memory, got the blocks window"),
        (["m", "--text", "empty.txt"], "--text: expected a non-empty file, got empty.txt, which is empty"),
        (["m", "--text", "missing.txt"], "--text: missing.txt: no such file"),
        (["m", "--text", "t.txt.xz"], "--text: expected plain text, got a xz file; decompress it first"),
        (
            ["m", "--text", "t.txt.gz"],
            "--text: expected plain text, got a gzip file; decompress it first",
        ),
        (
            ["m", "--text", "t.txt.bz2"],
            "--text: expected plain text, got a bzip2 file; decompress it first",
        ),
        (["m", "--text", "t.txt", "--out", "t.txt"], "--out: expected another file than --text"),
        (["m", "--text", "t.txt", "--out", "t.txt/p.html"], "--out: expected a folder that can be made"),
        (["m", "--text", "t.txt", "--layers", "3"], "--layers: expected layers with a memory (1, 2), got 3"),
        (["m", "--text", "t.txt", "--reach", "0"], "--reach: expected from 1 to 65,535 tokens, got 0"),
        (["missing", "--text", "t.txt"], "missing"),
    ],
)
def test_a_wrong_turn_is_one_line_and_leaves_nothing(run, home, arguments, message):
    before = sorted(home.iterdir())
    assert message in run(*arguments, code=2)
    assert sorted(home.iterdir()) == before


def test_a_failure_on_the_way_leaves_the_old_page(run, tmp_path, monkeypatch):
    (tmp_path / "p.html").write_text("before")

    def fails(*arguments):
        yield from ()
        raise OSError("disk full")

    monkeypatch.setattr("remanence.lens.record", fails)
    assert "disk full" in run("m", "--text", "t.txt", "--out", tmp_path / "p.html", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"] and (
        tmp_path / "p.html"
    ).read_text() == "before"


needs_browser = pytest.mark.skipif(
    executable() is None, reason="needs Chromium or Chrome: installed, or named by $CHROMIUM"
)


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_click_on_a_token_tells_what_python_saw(run, tmp_path, width):
    run("m", "--text", "t.txt", "--out", tmp_path / "p.html")
    page = unpack(tmp_path / "p.html")
    with Browser(width) as browser:
        browser.open(tmp_path / "p.html")
        assert browser("document.querySelector('#text').textContent") == TEXT * 10
        assert browser("document.documentElement.scrollWidth") <= width
        for token in (321, 330):
            browser.click(f"#text span[data-t='{token}']")
            assert (
                browser("document.querySelector('#chosen').textContent")
                == f"token {token} of {len(page.tokens):,}"
            )
            assert browser("document.querySelector('#text .chosen').dataset.t") == str(token)
            cells = browser(
                "[...document.querySelectorAll('#values td[data-value]')].map(cell => +cell.dataset.value)"
            )
            cells = np.array(cells, dtype=float).reshape(2, 5)
            np.testing.assert_allclose(cells[:, :4], page.signals[token], rtol=1e-6)
            gone = (1 - np.exp(page.keep[token + 1 :].astype(np.float64).sum(0))).mean(-1)
            np.testing.assert_allclose(cells[:, 4], gone, rtol=1e-4)
            told = browser(
                "[...document.querySelectorAll('#matches button')].map(b => [+b.dataset.t, +b.dataset.cosine])"
            )
            assert told == best(page, token)
            here = {t for t, _ in told}
            marked = browser("[...document.querySelectorAll('#text .match')].map(span => +span.dataset.t)")
            assert here <= set(marked) or len(told) == 12
        if width > 860:
            browser("document.querySelector('#head').value = 1; document.querySelector('#head').onchange()")
            browser("document.querySelector('#layer').value = 1; document.querySelector('#layer').onchange()")
            told = browser("[...document.querySelectorAll('#matches button')].map(b => +b.dataset.t)")
            assert sorted(told) == sorted(330 - page.distance[330, 1, 1])
            browser("[...document.querySelectorAll('#signals button')].forEach(button => button.click())")
            before = browser("document.querySelector('#matches button').dataset.t")
            browser.click("#matches button")
            assert browser("location.hash") == f"#{before}"
        assert not browser.errors
        assert all(address.startswith("file:") for address in browser.requests)


def best(page, token):
    """The list as the page should have it: earlier tokens by their best cosine, the newer first where they are
    level.
    """
    known = {}
    for distance, cosine in zip(
        page.distance[token].ravel().tolist(), page.cosine[token].ravel().tolist(), strict=True
    ):
        if distance:
            known[token - distance] = max(cosine, known.get(token - distance, -2))
    rows = sorted(known.items(), key=lambda row: (-row[1], -row[0]))[:12]
    return [[earlier, pytest.approx(cosine)] for earlier, cosine in rows]


@needs_browser
def test_a_head_that_keeps_everything_forgets_nothing(tmp_path):
    """Of two heads one lets half of all go at every token and the other nothing; a third memory has no such gate."""
    count, tokenizer = 40, Session(model("lmm", vocab_size=257)).tokenizer
    keep = torch.tensor([[0.5, 1.0], [0.99, 0.99], [torch.nan, torch.nan]]).log().expand(count, 3, 2)
    signals = torch.cat([torch.ones(count, 3, 3), 1 - keep.exp().mean(-1, keepdim=True)], -1)
    nothing = torch.zeros(count, 3, 2, 3)
    with open(tmp_path / "p.html", "w", encoding="utf-8", newline="\n") as file:
        page = Page(file, tokenizer, "t")
        page.add(Recording(list(b"a" * count), signals, keep, nothing, nothing, torch.ones(3), count))
        page.finish("facts", ["one", "two", "three"], [1.0] * 3, 8, 4)
    with Browser() as browser:
        browser.open(tmp_path / "p.html")
        for token in (0, 30, count - 1):
            browser.click(f"#text span[data-t='{token}']")
            told = browser(
                "[...document.querySelectorAll('#values tr')].slice(1).map(row => row.lastChild.dataset.value)"
            )
            later = count - 1 - token
            assert [float(value) for value in told] == pytest.approx(
                [(1 - 0.5**later) / 2, 1 - 0.99**later, float("nan")], abs=1e-6, nan_ok=True
            )
        assert not browser.errors


@needs_browser
def test_a_single_token_is_a_page_too(run, home, tmp_path):
    (home / "one.txt").write_text("a")
    run("m", "--text", "one.txt", "--out", tmp_path / "p.html")
    with Browser(390, 800, dark=True) as browser:
        browser.open(tmp_path / "p.html")
        browser.click("#text span")
        assert (
            browser("document.querySelector('#explained').textContent")
            == "Nothing was told it before this token."
        )
        assert not browser.errors


@needs_browser
def test_a_long_and_strange_text_is_drawn_in_part(run, home, tmp_path):
    """Only what is near the screen has elements; scripts in the text do not run; a token inside a character can be
    reached.
    """
    (home / "long.txt").write_text(ODD * 30, encoding="utf-8", newline="")
    run("m", "--text", "long.txt", "--out", tmp_path / "p.html", "--reach", 64)
    page = unpack(tmp_path / "p.html")
    with Browser() as browser:
        browser.open(tmp_path / "p.html")
        assert json.loads(browser("JSON.stringify(document.querySelector('#text').textContent)")) == ODD * 30
        assert 0 < browser("document.querySelectorAll('#text span').length") < len(page.tokens) / 3
        heights = "[...document.querySelectorAll('#text > div')].map(block => block.offsetHeight)"
        before = browser(heights)
        browser("scrollTo(0, document.body.scrollHeight)")
        browser.settle()
        assert browser(heights) == before, "a token's element takes the room that its text took"
        inside = next(t for t in range(len(page.tokens) - 500, len(page.tokens)) if page.tokens[t] == "")
        browser(f"location.hash = '#{inside}'")
        browser.settle()
        assert browser("document.querySelector('#chosen').textContent").endswith("part of a character")
        box = browser(
            "(({top, bottom}) => [top, bottom])(document.querySelector('#text .chosen').getBoundingClientRect())"
        )
        assert 0 < box[0] < box[1] < 900, "it is on the screen"
        browser.send("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
        assert browser("location.hash") == f"#{inside + 1}"
        browser.send("Input.dispatchKeyEvent", type="keyDown", key="Escape")
        assert browser("document.querySelector('#detail').hidden")
        assert not browser.errors


def test_a_long_text_is_shown_from_its_beginning_unless_all_is_asked_for(run, home, tmp_path, capsys):
    """Without a limit the page of a book has dozens of megabytes."""
    text, out = TEXT * 10, tmp_path / "p.html"

    def shown(*more):
        cli.main(["lens", str(home / "m"), "--text", str(home / "t.txt"), "--out", str(out), *more])
        return "".join(unpack(out).tokens), capsys.readouterr().err

    assert Lens(model=home, text=home).tokens == 20_000
    found, said = shown("--tokens", "300")
    assert found == text[:300] and "t.txt: only the first 300 tokens are shown; --tokens 0 shows all" in said
    for all_of_it in ("0", "20000", str(len(text))):
        found, said = shown("--tokens", all_of_it)
        assert found == text and "only the first" not in said
    assert "--tokens: expected at least 0, got -1" in run(
        "m", "--text", "t.txt", "--out", out, "--tokens", "-1", code=2
    )

"""Stores in a layer, a model and a file. That a layer is the loop it stands for is tested in test_knn_oracle.py."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from models import STORES, config, model, tokens

from remanence import Model, ModelConfig, Session, preset
from remanence.cli.models import inspect
from remanence.config import memorizing
from remanence.inference import memfile
from remanence.memory import ivf
from remanence.mixers import AttentionMixer, Context, Knn, SharedValues
from remanence.testing import assert_close

COUNT = 29


def context(x, shared=None):
    """Of a call that begins its documents."""
    given = SharedValues()
    given.entries.update(shared or {})
    return Context(torch.zeros(len(x), dtype=torch.int64), None, "on", None, given)


def layer(**knn):
    torch.manual_seed(5)
    made = Knn(config("knn", knn=knn)).double()
    with torch.no_grad():
        made.log_scale.normal_(1.0, 0.5)
        if made.gate is not None:
            made.gate.normal_()
    return made


def test_a_store_of_nothing_is_the_window_alone():
    subject = layer(size=0)
    plain = AttentionMixer(config("window"), sliding=True).double()
    plain.attention.load_state_dict(subject.attention.state_dict())
    x = torch.randn(2, COUNT, 16, dtype=torch.float64)
    assert_close(subject(x, None, context(x))[0], plain(x, None, context(x))[0], 1e-12)
    assert_close(
        layer()(x[:, :5], None, context(x))[0], plain(x[:, :5], None, context(x))[0], 1e-12
    )  # nothing stored yet


@pytest.mark.parametrize("fuse", ["gate", "joint"])
def test_gate_queries_and_temperature_learn_and_the_store_does_not(fuse):
    subject = layer(fuse=fuse)
    past, x = (torch.randn(1, n, 16, dtype=torch.float64, requires_grad=True) for n in (16, 4))
    _, state, _ = subject(past, None, context(past))
    assert not any(tensor.requires_grad for tensor in (*state.store.tensors(), state.k, state.v))
    y, _, _ = subject(x, state, context(x))
    wanted = [
        subject.log_scale,
        subject.attention.q_proj.weight,
        *([] if subject.gate is None else [subject.gate]),
    ]
    assert all(
        bool(grad.abs().sum() > 0)
        for grad in torch.autograd.grad(y.square().sum(), wanted, retain_graph=True)
    )
    # What is far behind reaches y through the store only, and so has no gradient.
    (grad,) = torch.autograd.grad(y.square().sum(), past)
    assert bool((grad[:, :11] == 0).all())


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("fuse", ["gate", "joint"])
def test_dense_learns_what_exact_search_of_all_entries_does(rows, fuse):
    """Over several segments, from a document's start and carried: each writes to a store that the one before has
    read.
    """
    x = torch.randn(rows, COUNT, 16, dtype=torch.float64)
    found = []
    for search in ("dense", "exact"):
        subject = layer(search=search, k=12, fuse=fuse)
        y, state, _ = subject(x, None, context(x))
        again, _, _ = subject(x, state, context(x))
        (y.square().sum() + again.square().sum()).backward()
        found.append([y, again, *(parameter.grad for parameter in subject.parameters())])
    assert_close(*found, 1e-10)


@pytest.mark.parametrize("variant", STORES)
def test_packed_documents_have_stores_of_their_own_length(variant):
    """However large a store may become. What is kept is whole, and goes on as each document alone does."""
    subject, counts = model(variant, knn={"size": 64, "k": 30}), [6, 0, 26, 8]
    searched = []
    for mixer in subject.mixers:
        if isinstance(mixer, Knn):
            search = mixer.search
            mixer.search = lambda q, store, *rest, search=search: (
                searched.append(store.size) or search(q, store, *rest)
            )
    documents, offsets = [tokens(1, count) for count in counts], [0, *accumulate(counts)]
    packed = torch.cat(documents, 1)
    lost = subject.trace(packed, offsets=offsets, keep=False)
    assert max(searched) <= max(counts)
    assert lost.state.blocks == () and lost.state.position.tolist() == counts
    kept = subject.trace(packed, offsets=offsets)
    assert_close(lost.hidden, kept.hidden, 0.0)
    grads = [
        torch.autograd.grad(trace.hidden.square().sum(), list(subject.backbone.parameters()))
        for trace in (lost, kept)
    ]
    assert_close(*grads, 0.0)
    more = tokens(len(counts), 13)
    after = subject(more, kept.state)
    for row, document in enumerate(documents):
        whole, end = subject(torch.cat([document, more[row : row + 1]], 1))
        assert_close(after[0][row], whole[0, -13:], 1e-9)
        assert_close(after[1].rows([row]), end, 1e-9)


def test_frozen_tokens_are_not_stored_and_saved_states_say_so(tmp_path):
    subject, x = model("knn"), tokens(1, COUNT)
    _, state = subject(x[:, :7])
    _, state = subject(x[:, 7:18], state, memory_mode="frozen")
    _, state = subject(x[:, 18:], state)
    held = state.blocks[0].store.position[0]
    assert sorted(held[held >= 0].tolist()) == [*range(7), *range(18, 25)][-12:]
    _, frozen = subject(x[:, :3], subject.start(1), memory_mode="frozen")
    memfile.save(tmp_path / "a.mem", subject, frozen)
    assert_close(memfile.load(tmp_path / "a.mem", subject), frozen, 0.0)


def test_surprise_is_what_the_model_did_not_expect():
    subject, x = model("surprising tokens", knn={"fraction": 0.2}), tokens(1, COUNT)
    logits, state = subject(x)
    loss = F.cross_entropy(logits[0, :-1].float(), x[0, 1:], reduction="none")
    worth = torch.cat([torch.tensor([2.3979]), loss])  # log 11: of the first token nothing was expected
    best = [begin + int(worth[begin : begin + 5].argmax()) for begin in range(0, 25, 5)]
    held = state.blocks[0].store.position[0]
    assert held[held >= 0].tolist() == best


def test_rare_tokens_are_the_table_s(tmp_path):
    subject, x = model("one store, rare tokens", knn={"fraction": 0.2, "evict": "oldest"}), tokens(1, COUNT)
    _, state = subject(x)
    rare = -subject.log_unigrams[x[0]]
    held = state.blocks[0].store.position[0]
    assert held[held >= 0].tolist() == [
        begin + int(rare[begin : begin + 5].argmax()) for begin in range(0, 25, 5)
    ]
    assert state.blocks[1].store.size == 0, "the second layer has none of its own"
    subject.save(tmp_path / "model")
    assert torch.equal(Model.load(tmp_path / "model").log_unigrams.cpu(), subject.log_unigrams.cpu())


def test_where_the_layer_stands():
    assert [memorizing(depth).index("knn") + 1 for depth in (12, 24, 6, 2, 1)] == [9, 18, 4, 2, 1]
    assert memorizing(4, 1, 3) == ("knn", "window", "knn", "window")
    assert preset("170m", "memorizing").blocks.index("knn") == 8
    with pytest.raises(ValueError, match="layers: expected places from 1 to num_layers=4, got"):
        memorizing(4, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 33, "size": 32}, "knn.k: expected at most the store's size of 32, got 33"),
        ({"size": -1}, "knn.size: expected an integer of at least 0, got -1"),
        ({"fuse": "gates"}, "knn.fuse: expected one of gate, joint, got 'gates'; did you mean 'gate'"),
        ({"fraction": 0}, "knn.fraction: expected above 0 and at most 1, got 0"),
        ({"half_life": -1}, "knn.half_life: expected a number of tokens above 0, or None, got -1"),
        ({"shared": 1}, "knn.shared: expected True or False, got 1"),
        ({"search": "exakt"}, "knn.search: expected one of exact, dense, triton, ivf.*did you mean 'exact'"),
        (
            {"write": "rares"},
            "knn.write: expected one of all, rare, surprise, random, got 'rares'; did you mean 'rare'",
        ),
        ({"sizes": 3}, "KnnConfig field: expected one of k, size.*did you mean 'size'"),
    ],
)
def test_bad_settings_are_one_line(fields, message):
    with pytest.raises(ValueError, match=message):
        Model(ModelConfig(vocab_size=8, dim=8, num_layers=1, heads=2, pattern=("knn",), knn=fields))


@pytest.mark.parametrize("fuse", ["gate", "joint"])
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(fuse, autocast):
    """Near float32's answers in every mode, with no store too; scores are float32's."""
    x = tokens(2, COUNT)
    for size in (12, 0):
        exact = model("knn", torch.float32, knn={"fuse": fuse, "size": size, "search": "dense"})
        other = (
            exact
            if autocast
            else model("knn", torch.bfloat16, knn={"fuse": fuse, "size": size, "search": "dense"})
        )
        for mode in ("on", "off", "frozen"):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                rough, _ = other(x, memory_mode=mode)
            truth, _ = exact(x, memory_mode=mode)
            assert (rough.float() - truth).std() < 0.03 * truth.std()


def test_states_of_other_layers_are_refused():
    subject, x = model("knn"), tokens(1, 7)
    for fields, message in (
        (
            {"knn": {"size": 24}},
            r"state: expected a store of \[12\], as this model's kNN layers have, got \[24\]",
        ),
        ({"window": 7}, r"state: expected a window of \[5\]"),
        ({"heads": 4}, r"state: expected a heads and their width of"),
        ({"knn": {"write": "surprise"}}, r"state: expected a last output of \[0\]"),
    ):
        _, state = model("knn", **fields)(x)
        with pytest.raises(ValueError, match=message):
            subject(x, state)


def test_tokens_in_the_store_cannot_be_taken_back():
    subject = model("knn")
    _, state = subject(tokens(1, 11))
    with pytest.raises(
        ValueError, match="tokens: expected at most 0, as earlier ones are in the store, got 1"
    ):
        state.crop(1)
    _, state = subject(tokens(1, 3))
    assert_close(state.crop(3).blocks[0].store, subject.start(1).blocks[0].store, 0.0)


@pytest.mark.parametrize("variant", STORES)
def test_an_answer_from_the_store_through_a_session_and_a_file(variant, tmp_path):
    torch.manual_seed(0)
    subject = Session(Model(config(variant, vocab_size=257)).eval())
    subject.read("the store holds what was read, far beyond the window. " * 3)
    subject.save(tmp_path / "a.mem")
    other = Session(subject.model).load(tmp_path / "a.mem")
    wanted = subject.generate("And", max_tokens=12, temperature=1.0, seed=3)
    assert other.generate("And", max_tokens=12, temperature=1.0, seed=3) == wanted
    assert_close(other.state, subject.state, 0.0)


def test_a_file_tells_what_its_stores_hold(tmp_path, capsys):
    subject = model("knn")
    memfile.save(tmp_path / "a.mem", subject, subject(tokens(1, 29))[1])
    inspect(tmp_path / "a.mem", as_json=True)
    stores = json.loads(capsys.readouterr().out)["stores"]
    assert (
        stores[0] == {"name": "blocks.0.store", "entries": [12], "size": 12, "written": [25]}
        and len(stores) == 2
    )
    inspect(tmp_path / "a.mem", as_json=False)
    assert "kNN stores" in capsys.readouterr().out


class TestLargeStores:
    @pytest.fixture(autouse=True)
    def _small_is_large(self, monkeypatch):
        monkeypatch.setattr(memfile, "LARGE", 200)
        monkeypatch.setattr(memfile, "LARGE_STORE", 200)

    def saved(self, path):
        subject = model("knn")
        _, state = subject(tokens(1, COUNT))
        memfile.save(path, subject, state)
        return subject, state

    def test_they_are_mapped_and_go_on(self, tmp_path):
        path = tmp_path / "a.mem"
        subject, state = self.saved(path)
        header, _ = memfile.read_file(path)
        assert "blocks.0.store.k" in header["large"] and "position" not in header["large"]
        before, x = path.read_bytes(), tokens(1, 13)
        loaded = memfile.load(path, subject)
        assert_close(loaded, state, 0.0)
        # Not to the last bit: in the file they lie where they lie (tests/test_places.py).
        assert_close(subject(x, loaded)[0], subject(x, state)[0], 1e-12)
        assert path.read_bytes() == before

    def test_they_stay_what_they_were_when_the_file_is_replaced(self, tmp_path):
        path = tmp_path / "a.mem"
        subject, state = self.saved(path)
        loaded, x = memfile.load(path, subject), tokens(1, 13)
        later = subject(x, loaded)[1]
        memfile.save(path, subject, later)  # the new file has entries of the one that it replaces
        assert_close(loaded, state, 0.0)
        assert_close(memfile.load(path, subject, verify=True), later, 0.0)
        path.unlink()
        assert_close(loaded, state, 0.0)
        assert_close(subject(x, loaded)[1], later, 1e-12)

    def test_only_stores_are_mapped_at_their_size(self, tmp_path, monkeypatch):
        """A tensor that is no store's is read and checked in full, even if a forged header calls it large."""
        monkeypatch.setattr(memfile, "LARGE", 2**28)
        path = tmp_path / "a.mem"
        subject, state = self.saved(path)
        header, _ = memfile.read_file(path)
        assert header["large"] and all(".store." in name for name in header["large"])
        broken = state._replace(
            blocks=tuple(
                part._replace(
                    attention=part.attention._replace(k=torch.full_like(part.attention.k, torch.nan))
                )
                for part in state.blocks
            )
        )
        with monkeypatch.context() as patch:
            patch.setattr(memfile, "is_lazy", lambda name, nbytes: nbytes > 200)
            patch.setattr(memfile, "_check_finite", lambda *_: None)
            memfile.save(path, subject, broken)
        with pytest.raises(ValueError, match=r"blocks\.0\.attention\.k: expected finite numbers"):
            memfile.load(path, subject)

    def test_damage(self, tmp_path):
        """Outside of what is mapped always noticed; inside when it is asked for, as `remanence inspect` does."""
        path = tmp_path / "a.mem"
        subject, _ = self.saved(path)
        whole = path.read_bytes()
        for end in (0, 7, 100, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:end])
            with pytest.raises(ValueError, match=str(path)):
                memfile.load(path, subject)
        opened = 0
        for place in range(8, len(whole), 211):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(ValueError, match=str(path)) as caught:
                memfile.load(path, subject, verify=True)
            assert "\n" not in str(caught.value)
            try:
                memfile.load(path, subject)
                opened += 1
            except ValueError:
                pass
        assert opened > 0

    def test_another_reader_s_idea_of_large(self, tmp_path, monkeypatch):
        """What this process would read is checked in full, whatever the file calls it."""
        path = tmp_path / "a.mem"
        subject, state = self.saved(path)
        monkeypatch.setattr(memfile, "LARGE", 2**28)
        monkeypatch.setattr(memfile, "LARGE_STORE", 2**28)
        assert_close(memfile.load(path, subject), state, 0.0)
        whole = path.read_bytes()
        start = int.from_bytes(whole[:8], "little") + 8
        place = start + json.loads(whole[8:start])["blocks.0.store.k"]["data_offsets"][0]
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"the checksum of blocks\.0\.store\.k does not fit"):
            memfile.load(path, subject)

    def test_another_model_s(self, tmp_path):
        path = tmp_path / "a.mem"
        self.saved(path)
        with pytest.raises(
            ValueError, match=r"another configuration: knn.size is 12 in the file, 13 in the model"
        ):
            memfile.load(path, model("knn", knn={"size": 13}))
        torch.manual_seed(8)
        other = Model(config("knn")).double()
        with pytest.raises(ValueError, match="other weights"):
            memfile.load(path, other)


@pytest.mark.slow
def test_a_writer_killed_at_any_time_leaves_the_old_store_or_the_new(tmp_path):
    path = tmp_path / "a.mem"
    code = """
import sys, torch
from remanence import Model, ModelConfig
from remanence.inference import memfile
memfile.LARGE = memfile.LARGE_STORE = 2**16
torch.manual_seed(0)
sizes = {"vocab_size": 8, "dim": 8, "num_layers": 1, "heads": 2, "window": 4}
model = Model(ModelConfig(**sizes, pattern=("knn",), knn={"size": 100_000}))
if len(sys.argv) > 2:
    state = memfile.load(sys.argv[1], model, verify=True)
    store, read = state.blocks[0].store, state.position
    assert bool((store.k == read).all() and (store.v == read).all() and (store.position == read - 1).all())
    sys.exit()
for turn in range(1, 1000):
    start = model.start(1).map(lambda tensor: torch.full_like(tensor, turn))
    block = start.blocks[0]
    attention = block.attention._replace(slack=torch.zeros_like(start.position))
    store = block.store._replace(position=torch.full_like(block.store.position, turn - 1))
    block = block._replace(attention=attention, store=store)
    memfile.save(sys.argv[1], model, start._replace(blocks=(block,)))
    print(turn, flush=True)
"""
    for wait in (0.0, 0.03, 0.08):
        command = [sys.executable, "-c", code, str(path)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        writer.stdout.readline()
        time.sleep(wait)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        subprocess.run([*command, "check"], check=True)


def test_approximate_search_in_a_model(monkeypatch):
    """A store that grows and wraps around within one call: about what exact search finds."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(ivf, "MIN_ENTRIES", 64)
    monkeypatch.setattr(ivf.IvfSearch.__init__, "__defaults__", (1.0,))  # every cell is looked into
    knn = {"k": 4, "size": 160}
    exact, found = (
        model("knn", torch.float32, knn={**knn, "search": search}).eval() for search in ("exact", "ivf")
    )
    x = tokens(1, 300)
    a, b = exact(x)[0], found(x)[0]
    assert (a - b).std() < 0.02 * a.std()
    mixer = copy.deepcopy(found).blocks[0].mixer
    assert mixer.search.recall is None or mixer.search.recall > 0.9


def test_the_table_is_never_trained(tmp_path):
    pytest.importorskip("transformers")
    from hf_models import RemanenceForCausalLM, wrapped

    outer = wrapped("one store, rare tokens")
    outer.save_pretrained(tmp_path / "m")
    again = RemanenceForCausalLM.from_pretrained(tmp_path / "m")
    assert not again.model.log_unigrams.requires_grad
    again.resize_token_embeddings(20)
    assert len(again.model.log_unigrams) == 20
    _, state = again.model(torch.randint(20, (1, 17)))
    assert not any(
        tensor.requires_grad
        for tensor in (state.blocks[0].token_importance, *state.blocks[0].store.tensors())
    )
    again.save_pretrained(tmp_path / "n")
    assert torch.equal(Model.load(tmp_path / "n").log_unigrams.cpu(), again.model.log_unigrams.cpu())

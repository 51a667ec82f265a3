"""A model's folder may come from anyone: whatever is in it, it works or is refused in one line, soon and at no cost."""

import copy
import itertools
import json
import random
import resource
import shutil
import time

import pytest
import torch
from damage import damaged
from models import config, pairs_tokenizer
from safetensors.torch import load_file, save_file

from remanence import MemoryConfig, Model, Session
from remanence.config import change
from remanence.evaluate.run import _training_facts
from remanence.evaluate.subject import Subject
from remanence.io.files import read_json, write_json

TEXT = "a memory"
TOKENS = torch.tensor([[1, 2, 3, 4]], device="cpu")
SECONDS, GIGABYTE = 30, 2**20
"""What for ever is, and a size as the system counts it, in units of 1,024 bytes."""

ODD = [
    None,
    True,
    -1,
    0,
    7,
    2**31 - 1,
    1e308,
    10**30,
    float("nan"),
    "",
    "x",
    [],
    {},
    [[[{}]]],
    {"a": {"b": [1]}},
]


def nested(depth):
    return [] if depth == 0 else [nested(depth - 1)]


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch):
    """Sizes that no weight tells are held against the machine's memory: let it be the same for all who test."""
    monkeypatch.setattr("remanence.folder.memory_of", lambda device: GIGABYTE * 1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model of every kind of block that has a state of its own, with a tokenizer."""
    folder = tmp_path_factory.mktemp("strangers") / "model"
    torch.manual_seed(0)
    with torch.device("cpu"):
        Model(config("hybrid", vocab_size=260, num_layers=4, pattern=("mac", "window", "knn", "lmm"))).save(
            folder
        )
    pairs_tokenizer(folder.parent / "pairs.json").save(folder)
    return folder


def use(folder):
    """Load a model and its tokenizer, and use both."""
    session = Session(folder)
    with torch.no_grad():
        logits, _ = session.model(TOKENS)
    return logits, session.tokenizer.encode(TEXT)


def same(a, b):
    return torch.equal(a[0], b[0]) and a[1] == b[1]


def copied(folder, to):
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def unsealed_copy(folder, to):
    copied(folder, to)
    data = read_json(to / "config.json")
    del data["remanence"]["digest"]
    write_json(to / "config.json", data)
    settings = read_json(to / "tokenizer_config.json")
    del settings["remanence_digest"]
    write_json(to / "tokenizer_config.json", settings)
    return to


def outcome(folder):
    """What using a folder gave, or None if it was refused as it should be: in one line, by name, and soon."""
    begun, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    came, message = None, "none"
    try:
        came = use(folder)
    except (ValueError, OSError) as error:
        message = str(error)
    assert message and "\n" not in message and len(message) < 1000
    assert time.process_time() - begun < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < GIGABYTE
    return came


def places(data, path=()):
    """Where values stand in JSON data."""
    if isinstance(data, (dict, list)):
        for key in data if isinstance(data, dict) else range(len(data)):
            yield (*path, key)
            yield from places(data[key], (*path, key))


def mutated(choose, data):
    """A value, wherever it stands, that is another; or one more, or one less."""
    data = copy.deepcopy(data)
    *path, last = choose.choice(list(places(data)))
    owner = data
    for key in path:
        owner = owner[key]
    kind = choose.random()
    if kind < 0.9:
        owner[last] = choose.choice([*ODD, nested(choose.choice([3, 300, 900]))])
    elif kind < 0.95 and isinstance(owner, dict):
        owner[choose.choice(["", "x", "digest", "remanence", "eos_token", "\n", "\ud800"])] = choose.choice(
            ODD
        )
    else:
        del owner[last]
    return data


def broken_bytes(folder, to, choose, whole):
    name = choose.choice(sorted(whole))
    data = damaged(choose, whole[name], list(whole.values()))
    (to / name).unlink() if data is None else (to / name).write_bytes(data)


def broken_values(
    folder, to, choose, whole, names=("config.json", "tokenizer.json", "tokenizer_config.json")
):
    name = choose.choice(names)
    (to / name).write_text(json.dumps(mutated(choose, json.loads(whole[name]))))


def fuzz(folder, to, count, break_it, *, changes=False):
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    expected, refused = use(folder), 0
    for seed in range(count):
        for name, data in whole.items():
            (to / name).write_bytes(data)
        break_it(folder, to, random.Random(seed), whole)
        came = outcome(to)
        refused += came is None
        assert came is None or changes or same(came, expected), seed
    assert refused > count / 4


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_damage_to_any_file_is_refused_or_changes_nothing(folder, tmp_path, count):
    fuzz(folder, tmp_path, count, broken_bytes)


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_an_odd_value_is_refused_or_changes_nothing(folder, tmp_path, count):
    fuzz(folder, tmp_path, count, broken_values)


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_an_odd_value_without_a_digest_works_or_is_refused(folder, tmp_path, count):
    (tmp_path / "broken").mkdir()
    plain = unsealed_copy(folder, tmp_path / "plain")
    fuzz(plain, tmp_path / "broken", count, broken_values, changes=True)


def changed(folder, to, **fields):
    """A copy without digests whose configuration has other fields: ``memory__heads`` is the memory's."""
    unsealed_copy(folder, to)
    data = read_json(to / "config.json")
    for name, value in fields.items():
        *path, last = name.split("__")
        owner = data["remanence"]
        for part in path:
            owner = owner[part]
        owner[last] = value
    write_json(to / "config.json", data)
    return to


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("window", None, "window: expected an integer of at least 1, got None"),
        ("dim", None, "dim: expected an integer of at least 1, got None"),
        ("num_layers", True, "num_layers: expected an integer of at least 1, got True"),
        ("vocab_size", 260.0, "vocab_size: expected an integer of at least 1, got 260.0"),
        ("heads", 10**30, "heads: expected an integer of at most 2,147,483,647, got 1000"),
        ("num_layers", 10**6, "num_layers: expected at most as many layers as tensors"),
        ("dim", 2**30, "memory.dim: expected the model's dim=1073741824, got 16"),
        ("ffn", 2**31 - 1, "ffn: expected a size that fits the"),
        ("vocab_size", 2**31 - 1, "vocab_size: expected a size that fits the"),
        ("persistent", 2**31 - 1, "persistent: expected a size that fits the"),
        ("ffn", 64, r"model.safetensors: .*ffn.gate.weight: expected shape \[64, 16\], got \[48, 16\]"),
        ("num_layers", 3, "a tensor 'backbone.blocks.3"),
        ("rotary", float("nan"), "rotary: expected a base above 0"),
        ("rotary", 10**400, "rotary: expected a base above 0 and at most 1e.15, got 1000"),
        ("pattern", ["mac"] * 10**5 + [None], "pattern: expected names of blocks"),
        ("pattern", ["mac", "x" * 10**6], "pattern: expected one of mac, mag"),
        ("pattern", {}, "pattern: expected names of blocks"),
        ("tie", None, "tie: expected True or False, got None"),
        ("hidden", 1, "ModelConfig field: expected one of"),
        ("memory", None, "tensor"),
        ("memory", 7, "memory: expected a MemoryConfig, or its fields in a dict, got int"),
        ("memory__net", ["deep"], "net: expected a name, got"),
        ("memory__net", "deeq", "net: expected one of .*did you mean 'deep'"),
        ("memory__rule", "x", "rule: expected one of"),
        ("memory__bias", 1, "bias: expected True, False or None, got 1"),
        ("memory__depth", 10**9, "depth: expected 1, 2, 3 or 4 layers"),
        ("memory__heads", 2**30, "heads: expected a divisor of dim=16"),
        ("memory__head_dim", 2**30, "memory.heads: expected a size that fits the"),
        ("memory__conv", 2**31 - 1, "memory.conv: expected a size that fits the"),
        (
            "memory__expansion",
            1e308,
            "expansion: expected a number above 0 and at most 2,147,483,647, got 1e.308",
        ),
        ("memory__expansion", 1e9, "memory.expansion: expected a size that fits the"),
        ("memory__step_bias", 10**30, "step_bias: expected a finite number"),
        ("knn__search", "x", "knn.search: expected one of"),
        ("knn__write", {}, "knn.write: expected a name, got {}"),
        ("knn__half_life", 1e308, "knn.half_life: expected a number of tokens"),
        ("knn__k", None, "knn.k: expected an integer"),
        ("window", 2**31 - 1, "expected a model for the .* of state .window: 2,147,483,647"),
        ("segment", 2**30, "expected a model for the .* of state .segment: 1,073,741,824"),
        ("knn__size", 2**31 - 1, "expected a model for the .* of state .knn.size: 2,147,483,647"),
    ],
)
def test_a_wrong_field_is_named_before_anything_is_built(folder, tmp_path, field, value, message):
    broken = changed(folder, tmp_path / "broken", **{field: value})
    with pytest.raises(ValueError, match=message) as raised:
        Model.load(broken)
    assert str(raised.value).startswith(str(broken)) and len(str(raised.value)) < 1000


def test_neighbours_may_be_more_than_a_window(tmp_path):
    made = Model(config("both memories", knn={"neighbours": 2**31 - 1}))
    wide = Model(config("both memories", knn={"neighbours": made.config.window}))
    wide.load_state_dict(made.state_dict())
    tokens = torch.arange(11).repeat(3).unsqueeze(0)
    assert torch.equal(made(tokens)[0], wide(tokens)[0])


def test_default_heads_are_found_at_once_at_any_width():
    for dim, net in itertools.product(range(1, 300), ("deep", "titans")):
        divisors = [heads for heads in range(1, dim + 1) if dim % heads == 0]
        wanted = 128 if net == "deep" else 64
        heads = min(divisors, key=lambda heads: abs(dim // heads - wanted))
        assert MemoryConfig(dim=dim, net=net).shape == (heads, dim // heads)
    begun = time.process_time()
    assert MemoryConfig(dim=2**31 - 1).shape == (2**31 - 1, 1)
    assert time.process_time() - begun < SECONDS


def rewritten(folder, to, change):
    """A copy whose weights have been changed and written by others."""
    copied(folder, to)
    save_file(change(load_file(to / "model.safetensors")), to / "model.safetensors")
    return to


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_float_dtype_run(folder, tmp_path, dtype):
    to = rewritten(folder, tmp_path / "a", lambda found: {name: x.to(dtype) for name, x in found.items()})
    logits, _ = use(to)
    assert logits.dtype == dtype and bool(logits.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_by_name(folder, tmp_path, dtype):
    to = rewritten(
        folder,
        tmp_path / "a",
        lambda found: found | {"model.embed.weight": found["model.embed.weight"].to(dtype)},
    )
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        ValueError, match=f"embed.weight: expected float16, bfloat16, float32, float64, got {name}"
    ):
        Model.load(to)


def test_norms_may_have_another_dtype_and_projections_may_not(folder, tmp_path):
    cast = lambda part: lambda found: {name: x.double() if part in name else x for name, x in found.items()}
    assert torch.allclose(use(rewritten(folder, tmp_path / "a", cast("norm")))[0], use(folder)[0], atol=1e-5)
    mixed = rewritten(folder, tmp_path / "b", cast("down"))
    with pytest.raises(
        ValueError, match=r"ffn.down.weight: expected float32, as the embedding, got float64; load"
    ):
        Model.load(mixed)
    assert Model.load(mixed, dtype=torch.float32)(TOKENS)[0].dtype == torch.float32


def test_weights_that_do_not_fit_the_machine_are_not_read(folder, tmp_path):
    """A file of holes: its header is true, and it takes no place on the disk."""
    broken, count = changed(folder, tmp_path / "a", vocab_size=2**30), 2**30 * 16 * 4
    header, at = {}, 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        shape = [2**30, 16] if name == "model.embed.weight" else list(tensor.shape)
        size = count if name == "model.embed.weight" else tensor.nbytes
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(broken / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    assert outcome(broken) is None
    with pytest.raises(ValueError, match=r"expected a model for the .* got 68,719,\d+,\d+ of weights"):
        Model.load(broken)


def test_two_names_of_one_tensor_are_refused(folder, tmp_path):
    twice = lambda found: found | {"embed.weight": found["model.embed.weight"].clone()}
    with pytest.raises(ValueError, match=r"a second tensor 'embed.weight'"):
        Model.load(rewritten(folder, tmp_path / "a", twice))


@pytest.fixture
def sharded(folder, tmp_path):
    """As Hugging Face writes a large model: in parts, with an index."""
    to = copied(folder, tmp_path / "sharded")
    found = sorted(load_file(to / "model.safetensors").items())
    (to / "model.safetensors").unlink()
    parts = {"a.safetensors": dict(found[:9]), "b.safetensors": dict(found[9:])}
    for name, tensors in parts.items():
        save_file(tensors, to / name)
    places = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    write_json(to / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return to


def test_a_model_in_parts_is_the_same(folder, sharded):
    assert same(use(sharded), use(folder))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("../model/a.safetensors", "expected names of .safetensors files beside it, got '../model"),
        ("/etc/passwd", "expected names of .safetensors files beside it"),
        ("..", "expected names of .safetensors files beside it"),
        ("a\n.safetensors", "expected names of .safetensors files beside it"),
        ("x" * 10**6 + ".safetensors", "expected names of .safetensors files beside it"),
        (None, "expected names of .safetensors files beside it, got None"),
        ("c.safetensors", "index.json: expected 'model.backbone.blocks.0.*' in a.safetensors, where it is"),
        ("b.safetensors", "index.json: expected 'model.backbone.blocks.0.*' in a.safetensors, where it is"),
    ],
)
def test_an_index_names_files_beside_it(sharded, place, message):
    index = read_json(sharded / "model.safetensors.index.json")
    index["weight_map"][min(index["weight_map"])] = place
    write_json(sharded / "model.safetensors.index.json", index)
    with pytest.raises(ValueError, match=message):
        Model.load(sharded)


def test_an_index_tells_the_truth(sharded):
    index = read_json(sharded / "model.safetensors.index.json")
    for places in (None, [], {}, "x"):
        write_json(sharded / "model.safetensors.index.json", {"weight_map": places})
        with pytest.raises(ValueError, match=r"expected a weight_map from tensors to files"):
            Model.load(sharded)
    more = {**index["weight_map"], "model.more": "a.safetensors"}
    write_json(sharded / "model.safetensors.index.json", {"weight_map": more})
    with pytest.raises(
        ValueError, match=r"expected tensors that are there, got 'model.more', not in a.safetensors"
    ):
        Model.load(sharded)
    write_json(sharded / "model.safetensors.index.json", index)
    save_file(
        load_file(sharded / "a.safetensors") | load_file(sharded / "b.safetensors"), sharded / "b.safetensors"
    )
    with pytest.raises(ValueError, match=r"b.safetensors: a second tensor"):
        Model.load(sharded)
    (sharded / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b.safetensors: no such file"):
        Model.load(sharded)


def test_a_damaged_number_of_the_configuration_is_noticed(folder, tmp_path):
    broken = copied(folder, tmp_path / "a")
    text = (broken / "config.json").read_text()
    (broken / "config.json").write_text(text.replace("10000.0", "90000.0"))
    with pytest.raises(
        ValueError, match=r"config.json: damaged, or changed by hand: .* remove the entry 'digest'"
    ):
        Model.load(broken)
    data = json.loads((broken / "config.json").read_text())
    del data["remanence"]["digest"]
    (broken / "config.json").write_text(json.dumps(data))
    assert Model.load(broken).config.rotary == 90000.0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("vocab", {}, "expected a tokenizer with tokens, got one without|not a tokenizer.json"),
        ("vocab", {"a": 2**40}, "not a tokenizer.json"),
        ("vocab", {"a": -1}, "not a tokenizer.json"),
        ("vocab", {"a": 2**32 - 9}, "tokenizer: expected at most the model's 260 tokens, got 4294967288"),
        ("vocab", nested(200), "not a tokenizer.json"),
        ("merges", [["m", "q" * 10**6]], "not a tokenizer.json"),
    ],
)
def test_an_odd_tokenizer_is_refused(folder, tmp_path, path, value, message):
    plain = unsealed_copy(folder, tmp_path / "a")
    data = read_json(plain / "tokenizer.json")
    data["model"][path], data["added_tokens"] = value, []
    data["model"]["merges"] = data["model"]["merges"] if path == "merges" else []
    write_json(plain / "tokenizer.json", data)
    write_json(plain / "tokenizer_config.json", {})
    with pytest.raises(ValueError, match=message) as raised:
        Session(plain)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_files_that_no_model_has_are_not_read(folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        broken = copied(folder, tmp_path / name)
        with open(broken / name, "r+b") as file:
            file.truncate(2**30)
        with pytest.raises(ValueError, match=rf"{name}: expected at most [\d,]+ bytes, got 1,073,741,824"):
            Session(broken)


def test_what_transformers_writes_is_read(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    from remanence.hf import RemanenceForCausalLM

    theirs = RemanenceForCausalLM.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "a")
    words = transformers.AutoTokenizer.from_pretrained(folder)
    words.save_pretrained(tmp_path / "a")
    assert same(use(tmp_path / "a"), use(folder))
    words.add_tokens(["memory"])
    words.save_pretrained(tmp_path / "a")
    theirs.config.remanence["rotary"] = 500.0
    theirs.save_pretrained(tmp_path / "a")
    session = Session(tmp_path / "a")
    assert session.model.config.rotary == 500.0 and session.tokenizer.encode("memory") == [258]
    again = RemanenceForCausalLM.from_pretrained(tmp_path / "a")
    assert again.config.native.rotary == 500.0
    broken = copied(folder, tmp_path / "b")
    text = (broken / "config.json").read_text()
    (broken / "config.json").write_text(text.replace("10000.0", "90000.0"))
    with pytest.raises(ValueError, match=r"remanence: damaged, or changed by hand"):
        RemanenceForCausalLM.from_pretrained(broken)


def test_what_training_wrote_is_used_only_if_it_can_be(folder, tmp_path):
    to = copied(folder, tmp_path / "a")
    for odd in ({}, {"tokens": "many", "data": []}, {"tokens": None, "data": {"a": 1}}):
        write_json(to / "trained.json", odd)
        assert _training_facts(Subject.load(to, torch.device("cpu")))["training_tokens"] is None
    (to / "trained.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"trained.json: expected a JSON object, got list"):
        _training_facts(Subject.load(to, torch.device("cpu")))


def test_commands_refuse_in_one_line(folder, tmp_path, command):
    text = tmp_path / "text"
    text.write_text(TEXT)
    for number, fields in enumerate([{"window": None}, {"num_layers": 10**6}, {"window": 2**31 - 1}]):
        broken = changed(folder, tmp_path / f"{number}", **fields)
        command("inspect", broken, code=2)
        command("generate", broken, "--prompt", "a", code=2)
        command("read", broken, text, "--save", tmp_path / "a.mem", code=2)


def test_layers_without_weights_are_not_built(folder, tmp_path, monkeypatch):
    """Empty tensors cost nothing: as many as one likes do not make a deep model."""
    config = read_json(folder / "config.json")
    own = {key: value for key, value in config["remanence"].items() if key != "digest"}
    write_json(tmp_path / "config.json", {**config, "remanence": {**own, "num_layers": 5000}})
    entries = {f"x{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(6000)}
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"expected a tensor 'backbone\.blocks\.0\..*', which is missing"):
        Model.load(tmp_path)


def test_a_folder_holds_one_model(folder, tmp_path):
    """Saved over a sharded one, it is the new one; weights and config of two saves are no model."""
    subject = Model.load(folder)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in subject.named_parameters()}
    names = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for part in set(names.values()):
        save_file(
            {name: tensors[name] + 1 for name, place in names.items() if place == part}, tmp_path / part
        )
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": names})
    write_json(tmp_path / "config.json", read_json(folder / "config.json"))
    Model.load(tmp_path)
    subject.save(tmp_path)
    names = ["config.json", "model.safetensors", "modeling_remanence.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(map(torch.equal, Model.load(tmp_path).parameters(), subject.parameters()))
    other = Model(change(subject.config, {"window": subject.config.window + 1}))
    other.save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "config.json", tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"saved with another configuration than config\.json"):
        Model.load(tmp_path)

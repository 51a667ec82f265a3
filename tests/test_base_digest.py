"""The digest of a pretrained model: every weight and every field that changes the function, and nothing else."""

import copy
import warnings

import pytest
import torch
from test_attached import FAMILIES, SMALL, base, trained
from transformers import AutoModelForCausalLM

import remanence
from remanence.attached import base as pretrained
from remanence.attached import folder as attached_folder
from remanence.attached.base import digest
from remanence.inference import memfile
from remanence.io.files import add_digest, check_digest, read_json, write_json

OTHERS = {
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "rope_type": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "factor": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "eps": {"rms_norm_eps": 1e-5},
    "activation": {"hidden_act": "gelu"},
    "heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
}


def attached(model, **settings):
    return remanence.attach(model, every=2, window=24, **SMALL | settings)


def zeroed(model):
    """Three quarters of the embedding's columns are zero, which a sample of every so many values may miss."""
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 8:] = 0
    return model


def changed(name):
    return zeroed(base()) if name == "zeroed" else base(**OTHERS[name])


@pytest.mark.parametrize("name", ["zeroed", *OTHERS])
def test_another_base_is_refused_by_folder_and_memory_file(tmp_path, name):
    own = trained(attached(base()))
    own.save(tmp_path / "own")
    session = remanence.Session(own)
    session.read("a few words")
    session.save(tmp_path / "a.mem")
    assert attached_folder.load(tmp_path / "own", base()).config.base == own.config.base
    with pytest.raises(ValueError, match="made for another pretrained model than this LlamaForCausalLM"):
        attached_folder.load(tmp_path / "own", changed(name))
    other = remanence.Session(trained(attached(changed(name))))
    with pytest.raises(ValueError, match=r"a\.mem: made by a model of another configuration: base is"):
        other.load(tmp_path / "a.mem")
    if name != "heads":  # which the memory's own configuration has, too
        assert other.load(tmp_path / "a.mem", force=True).tokens == 11


@pytest.mark.parametrize(
    "value", [lambda x: x.flatten()[-1:], lambda x: x[0, 7:8], lambda x: x.flatten()[1:2]]
)
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.3.mlp.up_proj.weight"]
)
def test_every_value_counts(name, value):
    model = base()
    first = digest(model)
    with torch.no_grad():
        value(model.get_parameter(name)).add_(0.5)
    assert digest(model) != first


@pytest.mark.parametrize(("family", "fields"), [
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
])  # fmt: skip
def test_fields_of_other_families_count(family, fields):
    assert digest(base(family)) != digest(base(family, **fields))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, None])
def test_saved_and_loaded_it_is_the_same_model(tmp_path, family, dtype):
    model = base(family)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    again.config.update(
        {"is_llama_config": True, "use_cache": False, "attention_dropout": 0.1, "pad_token_id": 3}
    )
    assert digest(again) == digest(model) == digest(copy.deepcopy(model).bfloat16())


def test_float16_is_compared_as_it_is_stored(tmp_path):
    base().save_pretrained(tmp_path / "base")
    own = trained(attached(tmp_path / "base"))
    own.save(tmp_path / "own")
    half = attached_folder.load(tmp_path / "own", dtype=torch.float16)
    assert half.base.dtype == torch.float16 and half.current_config().base == own.config.base


def gguf_file(path, eps):
    """A llama of one layer in float32."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(24)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(eps)
    writer.add_vocab_size(40)
    make = torch.Generator().manual_seed(0)
    shapes = {"token_embd": (40, 16), "output_norm": (16,), "output": (40, 16), "blk.0.attn_norm": (16,)}
    shapes |= {f"blk.0.attn_{x}": (16, 16) for x in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_norm": (16,), "blk.0.ffn_down": (16, 24)}
    shapes |= {f"blk.0.ffn_{x}": (24, 16) for x in ("gate", "up")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=make).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_and_a_folder_of_the_same_model_agree(tmp_path):
    """A GGUF has numbers in float32: 1e-5 is 9.99999975e-06 there."""
    model = pretrained.PretrainedSource.from_path(gguf_file(tmp_path / "a.gguf", 1e-5)).load_model()
    fields = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    made = type(model)(type(model.config)(**fields | {"rms_norm_eps": 1e-5}))
    made.load_state_dict(model.state_dict())
    made.save_pretrained(tmp_path / "folder")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert digest(again) == digest(model) == digest(made)
    other = pretrained.PretrainedSource.from_path(gguf_file(tmp_path / "b.gguf", 1e-6)).load_model()
    assert digest(other) != digest(model)


def test_weights_that_change_in_place_are_noticed(tmp_path):
    own = trained(attached(base()))
    session = remanence.Session(own)
    session.read("a few words")
    session.save(tmp_path / "a.mem")
    session.load(tmp_path / "a.mem")
    own.base.model.layers[0].mlp.up_proj.weight.data[3, 3] += 1  # which no version counter counts
    with pytest.raises(ValueError, match=r"another configuration: base is"):
        session.load(tmp_path / "a.mem")
    own.save(tmp_path / "own")
    with pytest.raises(ValueError, match="made for another pretrained model"):
        attached_folder.load(tmp_path / "own", base())


def test_what_an_earlier_version_saved_opens_with_a_warning(tmp_path, monkeypatch):
    own = trained(attached(base()))
    with monkeypatch.context() as patch:
        patch.setattr(memfile, "_config_dict", lambda model: {**model.config.to_dict(), "base": earlier})
        earlier = pretrained._legacy_digest(own.base)
        session = remanence.Session(own)
        session.read("a few words")
        session.save(tmp_path / "a.mem")
    own.save(tmp_path / "own")
    data = read_json(tmp_path / "own" / "config.json")
    data["remanence"] = add_digest({**check_digest("", data["remanence"]), "base": earlier})
    write_json(tmp_path / "own" / "config.json", data)
    with pytest.warns(UserWarning, match="samples of the pretrained model only; save it again") as said:
        again = attached_folder.load(tmp_path / "own", base())
    assert len(said) == 1 and again.config.base == digest(base())
    with pytest.warns(UserWarning, match=r"a\.mem: .*samples .*; save it again") as said:
        loaded = remanence.Session(again).load(tmp_path / "a.mem")
    assert len(said) == 1 and loaded.tokens == 11
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.save(tmp_path / "again")
        attached_folder.load(tmp_path / "again", base())
        loaded.save(tmp_path / "b.mem")
        loaded.load(tmp_path / "b.mem")
    with pytest.raises(ValueError, match="made for another pretrained model"):
        attached_folder.load(tmp_path / "own", base(hidden_size=64))

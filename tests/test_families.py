"""Every family of pretrained models: attaching changes nothing before training, narrowed windows are what they say, and
states, folders and generation agree.
"""

import copy
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from test_attached import SMALL, tokens, trained
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

import remanence
from remanence.attached import folder as attached_folder
from remanence.attached.families import FAMILIES, families_with_window

pytestmark = pytest.mark.sample(3)

SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPS = {"num_key_value_heads": 2}
CASES = {
    "llama": ("llama", GROUPS),
    "mistral": ("mistral", {**GROUPS, "sliding_window": None}),
    "mistral sliding": ("mistral", {**GROUPS, "sliding_window": 20}),
    "qwen2": ("qwen2", GROUPS),
    "qwen2 sliding": (
        "qwen2",
        {**GROUPS, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {**GROUPS, "head_dim": 16}),
    "qwen3 sliding": (
        "qwen3",
        {**GROUPS, "head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "smollm3": ("smollm3", GROUPS),
    "smollm3 sliding": ("smollm3", {**GROUPS, "use_sliding_window": True, "sliding_window": 20}),
    "gemma2": (
        "gemma2",
        {**GROUPS, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.5,
         "final_logit_softcapping": 0.7},
    ),
    "gemma3": (
        "gemma3_text",
        {**GROUPS, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24, "layer_types":
         ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 0.7},
    ),
    "phi3": ("phi3", {**GROUPS, "sliding_window": None}),
    "phi3 sliding and partly rotated": ("phi3", {**GROUPS, "sliding_window": 20, "rope_parameters":
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "olmo2": ("olmo2", GROUPS),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox in sequence": ("gpt_neox", {"use_parallel_residual": False, "rope_parameters":
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "gpt2": ("gpt2", {"n_inner": 48, "n_positions": 96}),
}  # fmt: skip
NARROWED = [name for name, (kind, _) in CASES.items() if kind in families_with_window()]
NEAR = {"rtol": 1e-4, "atol": 2e-5}


def base(case, **changes):
    torch.manual_seed(0)
    kind, own = CASES[case]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE | own | changes)).eval()
    with torch.no_grad():  # random models attend to everything alike: sharpen them
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and re.search(r"(q_proj|k_proj|qkv_proj|query_key_value|c_attn)\.", name):
                weight.mul_(8)
            elif weight.dim() == 1 and re.search(r"(q_norm|k_norm)\.", name):
                weight.add_(torch.rand_like(weight))
    return model


def test_every_family_is_tried():
    assert {kind for kind, _ in CASES.values()} == set(FAMILIES)


def test_the_documentation_lists_the_families():
    page = (Path(__file__).parent.parent / "docs" / "base-models.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", page, re.M)
    narrowed = families_with_window()
    wanted = [(name, family.models, name in narrowed) for name, family in FAMILIES.items()]
    assert [(name, models.strip(), window.strip() == "yes") for name, models, window in listed] == wanted


# Without a window


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_bit_identical_to_the_bases(case, dtype):
    model, x = base(case).to(dtype), tokens()
    with torch.no_grad():
        whole, first = model(x).logits, model(x[:, :33])
        rest = model(x[:, 33:], past_key_values=first.past_key_values).logits
        for place in ("beside", "front"):
            own = remanence.attach(copy.deepcopy(model), every=2, place=place, **SMALL)
            assert torch.equal(own(x).logits, whole)
            got = own(x[:, :33])
            assert torch.equal(got.logits, first.logits)
            assert torch.equal(own(x[:, 33:], past_key_values=got.past_key_values).logits, rest)


@pytest.mark.parametrize("case", CASES)
def test_states_padding_and_packing_agree_with_single_texts(case):
    model, x = trained(remanence.attach(base(case), every=2, **SMALL)), tokens()
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[0, :9] = False
    mask[1, 50:] = False
    with torch.no_grad():
        whole, _ = model(x)
        assert (whole - model(x, memory_mode="off")[0]).abs().max() > 0.002
        for cut in (1, 27, 69):
            first, state = model(x[:, :cut])
            second, state = model(x[:, cut:], state)
            torch.testing.assert_close(torch.cat([first, second], 1), whole, **NEAR)
        logits, state = model(x, mask=mask)
        rows = x[0, 9:], x[1, :50]
        for row, own in enumerate(rows):
            torch.testing.assert_close(logits[row][mask[row]], model(own.unsqueeze(0))[0][0], **NEAR)
        later = torch.tensor([[False] * 3 + [True] * 4, [True, False] * 3 + [True]])
        after = model(x[:, :7], state, mask=later)[0]  # rows at different places, with padding between
        for row, own in enumerate(rows):
            text = torch.cat([own, x[row, :7][later[row]]]).unsqueeze(0)
            torch.testing.assert_close(after[row][later[row]], model(text)[0][0, -4:], **NEAR)


@pytest.mark.parametrize(
    ("case", "window"), [*((case, None) for case in CASES), *((case, 16) for case in NARROWED)]
)
def test_generation_with_a_cache_is_generation_without(case, window):
    own = remanence.attach(base(case), every=2, window=window, sinks=2, **SMALL)
    trained(own)
    x = tokens(2, 30)
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    about = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "output_logits": True}
    about |= {"return_dict_in_generate": True}
    with_cache, without = (own.generate(x, use_cache=on, **about) for on in (True, False))
    assert torch.equal(with_cache.sequences, without.sequences)
    torch.testing.assert_close(with_cache.logits, without.logits, **NEAR)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_read_as_it_was_written(tmp_path, case):
    base(case).save_pretrained(tmp_path / "base")
    window = 16 if case in NARROWED else None
    own = trained(remanence.attach(tmp_path / "base", every=2, window=window, **SMALL))
    own.save(tmp_path / "own")
    again, x = attached_folder.load(tmp_path / "own").eval(), tokens()
    with torch.no_grad():
        assert torch.equal(again(x)[0], own(x)[0])


# Narrowed


def oracle(model, window, sinks, x, monkeypatch):
    """The base's own code with attention written out: a band of keys and the first tokens, one query at a time. The
    model rotates nothing; here queries and keys are rotated for each pair, a query at most as far from the first tokens
    as when they leave the window.
    """
    module = import_module(type(model).__module__)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
    rotary = model.base_model.rotary_emb

    def turned(y, place, layer):  # [b h n e], one place for each of n
        cos, sin = rotary(
            torch.zeros(1), place, *([layer.layer_type] if "Gemma3" in type(layer).__name__ else [])
        )
        size = cos.shape[-1]
        a, b = y[..., : size // 2], y[..., size // 2 : size]
        return torch.cat([y[..., :size] * cos + torch.cat([-b, a], -1) * sin, y[..., size:]], -1)

    def attention(layer, q, k, v, mask, scaling, sliding_window=None, softcap=None, **_):
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        turn = turned if getattr(layer, "use_rope", True) else lambda y, *_: y
        near = window if sliding_window is None else min(window, sliding_window)
        narrowed = sliding_window is None or window < sliding_window
        out = []
        for place in range(q.shape[2]):
            band = torch.arange(max(0, place - near + 1), place + 1)
            first = torch.arange(min(sinks, int(band[0]))) if narrowed else band[:0]
            scores = []
            for keys, at in ((first, min(place, window + sinks - 1)), (band, place)):
                if len(keys):
                    query = turn(q[:, :, place : place + 1], torch.tensor([[at]]), layer)
                    scores.append(query @ turn(k[:, :, keys], keys.unsqueeze(0), layer).mT * scaling)
            score = torch.cat(scores, -1)
            score = score if softcap is None else softcap * torch.tanh(score / softcap)
            out.append(score.softmax(-1) @ v[:, :, torch.cat([first, band])])
        return torch.cat(out, 2).transpose(1, 2), None

    AttentionInterface.register("oracle", attention)
    model.set_attn_implementation("oracle")
    with torch.no_grad():
        return model(x, use_cache=False).logits


@pytest.mark.parametrize(("window", "sinks"), [(16, 3), (24, 0)])
@pytest.mark.parametrize("case", NARROWED)
def test_a_narrowed_window_is_a_band_and_the_first_tokens(case, window, sinks, monkeypatch):
    """The smaller of the window and a layer's own (20 tokens here), which sees no first tokens if it is its own."""
    model, x = base(case), tokens(2, 60)
    own = remanence.attach(copy.deepcopy(model), every=2, window=window, sinks=sinks, **SMALL).model
    with torch.no_grad():
        plain = model(x).logits
        got, _ = own(x)
        pieces, state = [], None
        for cut in (slice(0, 1), slice(1, 19), slice(19, 20), slice(20, 60)):
            logits, state = own(x[:, cut], state)
            pieces.append(logits)
    wanted = oracle(model, window, sinks, x, monkeypatch)
    if "sliding" not in case or window < 20:
        assert (plain - wanted).abs().max() > 0.005  # narrowing does something
    torch.testing.assert_close(got, wanted, **NEAR)
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, **NEAR)


@pytest.mark.parametrize("case", [case for case in NARROWED if "sliding" in case or "gemma" in case])
def test_a_window_wider_than_the_models_own_changes_nothing(case):
    model, x = base(case, layer_types=["sliding_attention"] * 4), tokens(1, 60)
    own = remanence.attach(copy.deepcopy(model), every=2, window=40, sinks=3, **SMALL)
    with torch.no_grad():
        torch.testing.assert_close(own(x).logits, model(x).logits, **NEAR)


@pytest.mark.parametrize("case", NARROWED)
def test_a_store_searches_the_layers_own_queries_and_keys(case, monkeypatch):
    """What the adapter makes of a layer's input is what the layer itself makes, before rotation."""
    model, x = base(case), tokens(1, 40)
    module, seen = import_module(type(model).__module__), []
    plain = module.apply_rotary_pos_emb
    monkeypatch.setattr(
        module,
        "apply_rotary_pos_emb",
        lambda q, k, *rest, **more: (seen.append((q, k)), plain(q, k, *rest, **more))[1],
    )
    own = remanence.attach(model, kind="knn", layers=[0], window=16, sinks=2, k=4, size=64)
    asked = []
    read = type(own.model.memories["0"]).read
    monkeypatch.setattr(
        type(own.model.memories["0"]),
        "read",
        lambda self, at, qk, *rest: (asked.append(qk), read(self, at, qk, *rest))[1],
    )
    inner = trained(own)
    with torch.no_grad():
        on, off = inner(x)[0], inner(x, memory_mode="off")[0]
    for ours, theirs in zip(asked[0], seen[0], strict=True):
        torch.testing.assert_close(ours, theirs.transpose(1, 2))
    assert (on - off).abs().max() > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_lora_changes_nothing_at_first(case):
    model, x = base(case), tokens(1, 20)
    with torch.no_grad():
        whole = model(x).logits
        own = remanence.attach(model, every=2, lora=2, **SMALL)
        assert torch.equal(own(x).logits, whole)
    changed = {name for name, _ in own.model.saved_parameters() if ".lora_A." in name}
    assert len(changed) == 4 * len(FAMILIES[CASES[case][0]].lora)


# Refused


@pytest.mark.parametrize(
    ("case", "changes", "fields", "message"),
    [
        ("gpt2", {}, {"window": 16}, "^window: expected None for gpt2: its learned positions end at 96 tokens"),
        ("gpt2", {}, {"kind": "knn", "window": 16}, "^window: expected None for gpt2"),
        (
            "phi3",
            {"max_position_embeddings": 64, "original_max_position_embeddings": 32, "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
            {"window": 16},
            "^window: expected None for phi3 with rope_type 'longrope': its rotation changes with the length",
        ),
        ("gemma3", {"use_bidirectional_attention": True}, {}, "^model: expected causal attention, got gemma3_text"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_do_is_refused_in_one_line(case, changes, fields, message):
    model, x = base(case, **changes), tokens(1, 8)
    with pytest.raises(ValueError, match=message) as error:
        remanence.attach(model, every=2, **fields, **({} if "kind" in fields else SMALL))
    assert "\n" not in str(error.value)
    with torch.no_grad():
        model(x)  # the base is as it was
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_text_longer_than_learned_positions_is_refused():
    model = remanence.attach(base("gpt2"), every=2, **SMALL).model
    message = "^tokens: expected texts of at most 96 tokens, the learned positions of gpt2, got 97$"
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 97))
    _, state = model(tokens(2, 90))
    with pytest.raises(ValueError, match=message):
        model(tokens(2, 7), state)
    assert remanence.Session(model).read("short").tokens == 5

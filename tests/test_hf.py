"""The Hugging Face model is the native one: the same folder, logits, loss and gradients, by whichever road."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hf_models import NAMES, greedy, padded, transformers, wrapped
from models import config, model, tokens
from safetensors.torch import load_file, save_file

from remanence import Model
from remanence.hf import RemanenceCache, RemanenceConfig, RemanenceForCausalLM
from remanence.testing import assert_close
from remanence.tokenizers.tokens import ByteTokenizer, load_tokenizer

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.skipif(
        os.environ.get("REMANENCE_TEST_DEVICE", "cpu") != "cpu", reason="loads folders to the CPU"
    ),
]
AutoModel = transformers.AutoModelForCausalLM


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", NAMES)
def test_a_folder_is_both(variant, dtype, tie, tmp_path):
    native, x = model(variant, dtype, tie=tie), tokens()
    native.save(tmp_path / "native")
    outer, found = AutoModel.from_pretrained(tmp_path / "native", output_loading_info=True)
    assert not any(found.values())
    assert outer.dtype == dtype and not outer.training
    assert torch.equal(outer(x).logits, native(x)[0])
    outer.save_pretrained(tmp_path / "hf")
    again = Model.load(tmp_path / "hf")
    assert again.config == native.config
    for other in (outer.model, again, AutoModel.from_pretrained(tmp_path / "hf").model):
        assert_close(dict(other.named_parameters()), dict(native.named_parameters()), 0.0)
        assert {name: p.dtype for name, p in other.named_parameters()} == {
            name: p.dtype for name, p in native.named_parameters()
        }


@pytest.mark.parametrize("variant", NAMES)
class TestForward:
    def test_padding_wherever_it_stands(self, variant):
        outer, x = wrapped(variant), tokens(4)
        mask = torch.ones_like(x)
        mask[0, :7] = 0
        mask[1, 15:] = 0
        mask[2, [3, 4, 11, 20]] = 0
        logits, state = outer.model(x, mask=mask.bool())
        out = outer(x, attention_mask=mask)
        assert torch.equal(out.logits, logits)
        assert_close(out.past_key_values.state, state, 0.0)
        assert torch.equal(outer(x, attention_mask=torch.ones_like(x)).logits, outer.model(x)[0])

    def test_a_cache_carries_on(self, variant):
        """Masks of the new tokens and of all tokens are the same; a cache that is given is changed, a state never."""
        outer, (x, mask, _) = wrapped(variant), padded(20)
        _, state = outer.model(x[:, :12], mask=mask[:, :12].bool())
        logits, end = outer.model(x[:, 12:], state)
        for late in (mask, mask[:, 12:], None):
            cache = outer(x[:, :12], attention_mask=mask[:, :12]).past_key_values
            assert cache.get_seq_length() == 12
            held = cache.state
            out = outer(x[:, 12:], attention_mask=late, past_key_values=cache)
            assert torch.equal(out.logits, logits)
            assert out.past_key_values is cache and cache.get_seq_length() == 20
            assert_close(cache.state, end, 0.0)
            assert_close(held, state, 0.0)

    def test_hidden_states(self, variant):
        outer, (x, mask, prompts) = wrapped(variant, torch.float64), padded()
        out = outer(x, attention_mask=mask, output_hidden_states=True)
        assert len(out.hidden_states) == outer.config.num_hidden_layers + 1
        assert torch.equal(outer.model.logits(out.hidden_states[-1]), out.logits)
        for row, prompt in enumerate(prompts):
            alone = outer(prompt, output_hidden_states=True).hidden_states
            assert torch.equal(alone[0], outer.get_input_embeddings()(prompt))
            assert_close([h[row, mask[row] == 1] for h in out.hidden_states], [h[0] for h in alone], 1e-9)
        assert outer(x).hidden_states is None

    def test_checkpointing_changes_no_gradient(self, variant):
        outer, x = wrapped(variant).train(), tokens()
        grads = []
        for switch in (outer.gradient_checkpointing_disable, outer.gradient_checkpointing_enable):
            switch()
            outer.zero_grad()
            outer(x, labels=x).loss.backward()
            grads.append([p.grad.clone() for p in outer.parameters() if p.requires_grad])
        assert outer.is_gradient_checkpointing and outer.model.checkpointing
        assert_close(grads[0], grads[1], 1e-6)
        outer.gradient_checkpointing_disable()
        assert not outer.is_gradient_checkpointing and not outer.model.checkpointing


def test_logits_to_keep():
    outer, x = wrapped(), tokens()
    whole = outer(x).logits
    assert_close(outer(x, logits_to_keep=3).logits, whole[:, -3:], 1e-6)
    assert_close(outer(x, logits_to_keep=torch.tensor([0, 5])).logits, whole[:, [0, 5]], 1e-6)


def test_the_loss_is_that_of_the_next_token():
    outer, x = wrapped(), tokens()
    labels = x.clone()
    labels[0, :9] = -100
    logits = outer.model(x)[0]
    each = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
    )
    assert_close(outer(x, labels=labels).loss, each.sum() / (labels[:, 1:] != -100).sum(), 1e-6)
    assert_close(outer(x, labels=labels, num_items_in_batch=torch.tensor(77)).loss, each.sum() / 77, 1e-6)


def test_padding_has_no_part_in_the_loss():
    """Not even as what the first token is predicted from: the loss is that of each prompt alone."""
    outer = wrapped()
    x, mask, prompts = padded()
    labels = x.masked_fill(mask == 0, -100)
    total = sum(F.cross_entropy(outer.model(p)[0][0, :-1], p[0, 1:], reduction="sum") for p in prompts)
    count = sum(p.shape[1] - 1 for p in prompts)
    assert_close(outer(x, attention_mask=mask, labels=labels).loss, total / count, 1e-6)


def test_what_comes_back():
    outer, x = wrapped(), tokens()
    logits, cache = outer(x, return_dict=False)
    assert torch.equal(logits, outer(x).logits) and isinstance(cache, RemanenceCache)
    assert outer(x, use_cache=False).past_key_values is None
    assert outer.train()(x).past_key_values is None
    given = RemanenceCache()
    assert outer(x, past_key_values=given).past_key_values is given
    outer(x, past_key_values=given, use_cache=False)
    assert given.get_seq_length() == x.shape[1]


def test_the_memory_mode_is_the_native_one():
    outer, x = wrapped(), tokens()
    outer.model.memory_mode = "frozen"
    assert torch.equal(outer(x).logits, outer.model(x, memory_mode="frozen")[0])
    assert not torch.equal(outer(x).logits, outer.model(x, memory_mode="on")[0])


class TestWeights:
    @pytest.mark.parametrize("tie", [True, False])
    @pytest.mark.parametrize("variant", NAMES)
    def test_a_new_model_is_a_new_native_model(self, variant, tie):
        """Made at once; or on the meta device, given memory, and initialised."""
        torch.manual_seed(3)
        native = Model(config(variant, tie=tie))
        torch.manual_seed(3)
        at_once = AutoModel.from_config(RemanenceConfig(native.config))
        assert_close(dict(at_once.model.named_parameters()), dict(native.named_parameters()), 0.0)
        with torch.device("meta"):
            empty = RemanenceForCausalLM(RemanenceConfig(native.config))
        empty.to_empty(device="cpu")
        torch.manual_seed(3)
        empty.init_weights()
        assert_close(dict(empty.model.named_parameters()), dict(native.named_parameters()), 0.0)

    def test_a_new_model_in_half_precision(self):
        outer = AutoModel.from_config(RemanenceConfig(config()), dtype=torch.bfloat16)
        assert {p.dtype for p in outer.parameters()} == {torch.bfloat16}
        assert outer(tokens()).logits.isfinite().all()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda found: found.pop("model.backbone.blocks.1.mixer.memory.layer.initial.layer0"),
                "expected a tensor .*initial.layer0.*missing",
            ),
            (
                lambda found: found.pop("model.embed.weight"),
                "expected a tensor 'model.embed.weight', which is missing",
            ),
            (
                lambda found: found.update({"model.head.weight": torch.ones(11, 16)}),
                "a tensor 'model.head.weight' that a model",
            ),
            (
                lambda found: found.update({"model.backbone.norm.weight": torch.ones(4)}),
                r"model.backbone.norm.weight: expected shape \[16\], got \[4\]",
            ),
        ],
    )
    def test_a_wrong_checkpoint_is_refused(self, change, message, tmp_path):
        model().save(tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        change(found)
        save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            AutoModel.from_pretrained(tmp_path)

    def test_sizes_may_differ_if_that_is_asked_for(self, tmp_path):
        """Only what does not fit is new, and it is drawn as in a native model."""
        native = model("mac", torch.float32)
        native.save(tmp_path)
        outer = AutoModel.from_pretrained(
            tmp_path, config=RemanenceConfig(config("mac", vocab_size=211)), ignore_mismatched_sizes=True
        )
        found = dict(outer.model.named_parameters())
        assert 0.9 < found["embed.weight"].std() * 16**0.5 < 1.1
        assert_close({**found, "embed.weight": native.embed.weight}, dict(native.named_parameters()), 0.0)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_the_vocabulary_can_grow_and_shrink(tie, mean, tmp_path):
    outer, x = wrapped(tie=tie), tokens()
    before = outer(x).logits
    outer.resize_token_embeddings(211, mean_resizing=mean)
    assert_close(outer(x).logits[..., :11], before, 1e-6)
    assert outer(torch.tensor([[3, 210]])).logits.shape[-1] == 211
    assert outer(x, labels=x).loss.isfinite()
    if not mean:
        for weight in {
            outer.get_input_embeddings().weight,
            (outer.get_output_embeddings() or outer.model.embed).weight,
        }:
            assert 0.9 < weight[11:].std() * outer.config.hidden_size**0.5 < 1.1
    outer.save_pretrained(tmp_path)
    assert torch.equal(Model.load(tmp_path)(x)[0], outer(x).logits)
    outer.resize_token_embeddings(11)
    assert torch.equal(outer(x).logits, before)
    assert outer.model.config == config(tie=tie)
    with pytest.raises(ValueError, match="tokens: expected numbers from 0 to 10"):
        outer(torch.tensor([[11]]))


def test_embeddings_are_the_native_ones():
    tied, free = wrapped(tie=True), wrapped(tie=False)
    assert tied.get_input_embeddings() is tied.model.embed and tied.get_output_embeddings() is None
    assert free.get_output_embeddings() is free.model.head
    x = tokens()
    for outer in (tied, free):
        before = outer(x).logits
        other = torch.nn.Embedding(11, 16)
        outer.set_input_embeddings(other)
        assert not torch.equal(outer(x).logits, before)
        assert torch.equal(outer(x, output_hidden_states=True).hidden_states[0], other(x))
    double = torch.nn.Linear(16, 11, bias=False)
    double.weight.data = 2 * free.model.head.weight.data
    before = free(x).logits
    free.set_output_embeddings(double)
    assert_close(free(x).logits, 2 * before, 1e-6)
    with pytest.raises(
        ValueError, match=r"new_embeddings: expected none, as the logits use the input's \(tie\), got Linear"
    ):
        tied.set_output_embeddings(double)


class TestConfig:
    def test_it_is_the_native_one(self, tmp_path):
        for name in NAMES:
            own = RemanenceConfig(config(name))
            own.save_pretrained(tmp_path)
            read = transformers.AutoConfig.from_pretrained(tmp_path)
            assert read.native == config(name)
            assert read.remanence == own.remanence == RemanenceConfig(config(name).to_dict()).remanence
        assert own != RemanenceConfig(config("mac"))
        assert RemanenceConfig().native.vocab_size == 257

    def test_names_that_contradict_it_are_refused(self, tmp_path):
        model().save(tmp_path)
        with pytest.raises(
            ValueError, match="vocab_size: expected 11, as its entry 'remanence' says, got 300"
        ):
            AutoModel.from_pretrained(tmp_path, vocab_size=300)
        with pytest.raises(
            ValueError, match="tie_word_embeddings: expected True, as its entry 'remanence' says, got False"
        ):
            RemanenceForCausalLM(RemanenceConfig(config(), tie_word_embeddings=False))
        with pytest.raises(ValueError, match="did you mean 'pattern'"):
            RemanenceConfig({**config().to_dict(), "patern": ["mac"]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"position_ids": torch.arange(3)[None]},
            "position_ids: expected None, as tokens are read in the order they stand",
        ),
        (
            {"output_attentions": True},
            "output_attentions: expected None, as attention weights are never laid out, got bool",
        ),
        ({"input_ids": None}, "input_ids: expected tokens, got None"),
        ({"attention_mask": torch.ones(1, 2)}, r"mask: expected booleans of shape \[1, 3\]"),
        ({"past_key_values": ()}, "past_key_values: expected a RemanenceCache or None, got tuple"),
    ],
)
def test_what_forward_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        wrapped()(**{"input_ids": tokens(1, 3), **fields})


def test_the_trainer(tmp_path):
    """Loss falls on a toy corpus, with accumulation and checkpointing; what it saves is a native folder too."""
    pytest.importorskip("accelerate")
    torch.manual_seed(1)
    outer = RemanenceForCausalLM(RemanenceConfig(config("mag", vocab_size=257)))
    text = torch.tensor(ByteTokenizer().encode("to be or not to be, that is the question. " * 8))
    data = [{"input_ids": row, "labels": row} for row in text[: len(text) // 24 * 24].view(-1, 24)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=10,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=2e-2,
        save_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(outer, arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before - 1
    x = text[None, :40]
    logits = outer.eval()(x).logits
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "checkpoint-10")(x).logits, logits)
    assert torch.equal(Model.load(tmp_path / "checkpoint-10")(x)[0], logits)


def test_accumulation_is_one_large_batch():
    """Batches of unequal numbers of labels, weighed by their tokens, give the gradient of all at once."""
    outer, x = wrapped("hybrid", torch.float64).train(), tokens(4)
    labels = x.clone()
    labels[0, 5:] = -100
    grads = []
    for rows in ([slice(0, 4)], [slice(0, 1), slice(1, 4)]):
        outer.zero_grad()
        count = (labels[:, 1:] != -100).sum()
        for part in rows:
            outer(x[part], labels=labels[part], num_items_in_batch=count).loss.backward()
        grads.append([p.grad.clone() for p in outer.parameters()])
    assert_close(grads[0], grads[1], 1e-6)


@pytest.mark.slow
def test_as_a_user(tmp_path):
    """A folder saved natively, with its tokenizer: Auto classes without a word of warning, and a pipeline."""
    native = model("hybrid", torch.float32, vocab_size=257)
    native.save(tmp_path)
    ByteTokenizer().save(tmp_path)
    text = "Grüße, world"
    expected = greedy(native, torch.tensor([ByteTokenizer().encode(text)]), 9)[0].tolist()
    code = f"""
import warnings
warnings.simplefilter("error")
import remanence.hf
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline, logging
logging.disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path)!r})
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
inputs = tokenizer({text!r}, return_tensors="pt")
print(model.generate(**inputs, max_new_tokens=9, do_sample=False)[0].tolist())
model.save_pretrained({str(tmp_path / "again")!r})
tokenizer.save_pretrained({str(tmp_path / "again")!r})
logging.set_verbosity_error()  # some versions' pipelines warn of their own doings
generator = pipeline("text-generation", model={str(tmp_path / "again")!r}, device="cpu")
found = generator({text!r}, max_new_tokens=9, do_sample=False, return_tensors=True)
print([x["generated_token_ids"] for x in found][0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == [str(expected)] * 2
    assert load_tokenizer(tmp_path / "again").encode(text) == ByteTokenizer().encode(text)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "remanence.hf")
    with pytest.raises(
        ImportError, match=r"remanence.hf needs the extra 'hf': pip install 'remanence\[hf\]'"
    ):
        importlib.import_module("remanence.hf")

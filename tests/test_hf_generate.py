"""Hugging Face's generate on the native state: greedy, sampled, beams, padded batches, and its cache in every order."""

import copy
import os

import pytest
import torch
from hf_models import NAMES, greedy, padded, transformers, wrapped
from models import tokens

from remanence.hf import RemanenceCache
from remanence.testing import assert_close

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.skipif(
        os.environ.get("REMANENCE_TEST_DEVICE", "cpu") != "cpu", reason="loads folders to the CPU"
    ),
]
AutoModel = transformers.AutoModelForCausalLM


@pytest.mark.parametrize("variant", NAMES)
class TestGenerate:
    def test_greedy_with_and_without_a_cache(self, variant):
        outer, x = wrapped(variant), tokens(2, 13)
        expected = greedy(outer.model, x, 6)
        for fields in ({}, {"use_cache": False}, {"prefill_chunk_size": 5}):
            assert torch.equal(outer.generate(x, max_new_tokens=6, do_sample=False, **fields), expected), (
                fields
            )

    def test_a_padded_batch_is_each_prompt_alone(self, variant):
        outer, (x, mask, prompts) = wrapped(variant), padded()
        alone = [greedy(outer.model, prompt, 6)[0, -6:] for prompt in prompts]
        for fields in ({}, {"prefill_chunk_size": 5}):
            found = outer.generate(x, attention_mask=mask, max_new_tokens=6, do_sample=False, **fields)
            assert torch.equal(found[:, 12:], torch.stack(alone)), fields

    def test_going_on_from_a_returned_cache_is_one_long_generation(self, variant):
        outer, (x, mask, _) = wrapped(variant), padded()
        fields = {"do_sample": False, "return_dict_in_generate": True}
        whole = outer.generate(x, attention_mask=mask, max_new_tokens=8, **fields)
        half = outer.generate(x, attention_mask=mask, max_new_tokens=3, **fields)
        longer = torch.cat([mask, torch.ones(3, 3, dtype=torch.int64)], 1)
        cache = half.past_key_values
        rest = outer.generate(
            half.sequences, attention_mask=longer, max_new_tokens=5, past_key_values=cache, **fields
        )
        assert torch.equal(rest.sequences, whole.sequences)
        assert_close(rest.past_key_values.state, whole.past_key_values.state, 1e-5)

    def test_beam_search(self, variant):
        outer, (x, mask, prompts) = wrapped(variant), padded()
        fields = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5, "do_sample": False}
        found = outer.generate(x, attention_mask=mask, **fields)
        assert torch.equal(outer.generate(x, attention_mask=mask, use_cache=False, **fields), found)
        assert torch.equal(found[:2, 12:], outer.generate(prompts[0], **fields)[:, -5:])


def test_beams_enough_for_every_text_find_the_best():
    """Three tokens of a vocabulary of five: 25 beams miss none, and all 125 texts are scored natively."""
    outer = wrapped("hybrid", vocab_size=5)
    x = tokens(1, 7, 5)
    texts = torch.cartesian_prod(*[torch.arange(5)] * 3)
    logits, _ = outer.model(torch.cat([x.expand(125, -1), texts], 1))
    chances = logits[:, 6:9].log_softmax(-1).gather(-1, texts.unsqueeze(-1)).sum((1, 2))
    best = chances.argsort(descending=True)[:4]
    found = outer.generate(x, num_beams=25, num_return_sequences=4, max_new_tokens=3, do_sample=False)
    assert torch.equal(found[:, 7:], texts[best])


def test_sampling_does_not_depend_on_the_cache():
    outer, (x, mask, _) = wrapped("hybrid"), padded()
    found = []
    for fields in ({}, {"use_cache": False}, {"use_cache": False}):
        torch.manual_seed(len(found) // 2)
        found.append(
            outer.generate(
                x, attention_mask=mask, max_new_tokens=6, do_sample=True, num_return_sequences=3, **fields
            )
        )
    assert found[0].shape[0] == 9
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2]), "another seed samples another text"


def test_generation_ends_at_the_end():
    outer, x = wrapped(), tokens(1, 13)
    text = greedy(outer.model, x, 12)[0, 13:].tolist()
    first = text.index(text[5])
    found = outer.generate(x, max_new_tokens=12, do_sample=False, eos_token_id=text[5], pad_token_id=text[5])
    assert found[0, 13:].tolist() == text[: first + 1]


def test_what_generation_refuses():
    outer, x = wrapped(), tokens(1, 13)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        outer.generate(x, prompt_lookup_num_tokens=2, max_new_tokens=3)
    with pytest.raises(
        ValueError, match="past_key_values: expected a RemanenceCache or None, got DynamicCache"
    ):
        outer.generate(x, past_key_values=transformers.DynamicCache(), max_new_tokens=3)
    with pytest.raises(
        ValueError, match=r"attention_mask: expected padding on the left only \(padding_side='left'\)"
    ):
        outer.generate(x, attention_mask=torch.arange(13)[None] < 11, max_new_tokens=3)
    with pytest.raises(
        ValueError, match="inputs_embeds: expected None, as the model reads tokens, got Tensor"
    ):
        outer.generate(inputs_embeds=outer.get_input_embeddings()(x), max_new_tokens=3)


class TestCache:
    @pytest.mark.parametrize("variant", NAMES)
    @torch.no_grad()
    def test_rows(self, variant):
        outer, (x, mask, _) = wrapped(variant, torch.float64), padded(20)
        first = outer(x[:, :12], attention_mask=mask[:, :12]).past_key_values
        whole = outer(x[:, 12:], past_key_values=copy.deepcopy(first)).logits
        for method, argument, rows in (
            ("reorder_cache", torch.tensor([2, 2, 0]), [2, 2, 0]),
            ("batch_select_indices", torch.tensor([1]), [1]),
            ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ):
            cache = copy.deepcopy(first)
            getattr(cache, method)(argument)
            assert cache.batch_size == len(rows)
            assert_close(outer(x[rows, 12:], past_key_values=cache).logits, whole[rows], 1e-12, method)
        assert first.get_seq_length() == 12 and first.batch_size == 3

    @pytest.mark.parametrize("variant", NAMES)
    def test_crop_is_not_having_read(self, variant):
        outer, x = wrapped(variant, torch.float64), tokens(2, 20)
        whole = outer(x).logits
        cache = outer(x[:, :15]).past_key_values
        cache.crop(0)
        cache.crop(-3)
        assert cache.get_seq_length() == 12
        assert_close(outer(x[:, 12:], past_key_values=cache).logits, whole[:, 12:], 1e-9)

    def test_crop_refuses_what_it_cannot_take_back(self):
        outer, x = wrapped(), tokens(2, 22)
        cache = outer(x[:, :14]).past_key_values
        with pytest.raises(
            ValueError,
            match="tokens: expected at most 2, the tokens since the last complete chunk, got 3",
        ):
            cache.crop(-3)
        with pytest.raises(
            ValueError, match=r"tokens_to_remove: expected 0 to -14 \(tokens since padding\), got 12"
        ):
            cache.crop(12)
        mask = torch.ones(2, 8, dtype=torch.int64)
        mask[1, 6] = 0
        outer(x[:, 14:], attention_mask=mask, past_key_values=cache)
        with pytest.raises(
            ValueError, match=r"tokens_to_remove: expected 0 to -1 \(tokens since padding\), got -2"
        ):
            cache.crop(-2)
        assert cache.get_seq_length() == 22, "what is refused changes nothing"
        cache.crop(-1)
        assert cache.get_seq_length() == 21

    def test_from_a_native_state_and_back_to_nothing(self):
        outer, x = wrapped(), tokens(2, 20)
        logits, state = outer.model(x[:, :12])
        cache = RemanenceCache(state)
        found = outer.generate(x, past_key_values=cache, max_new_tokens=5, do_sample=False)
        assert torch.equal(found, greedy(outer.model, x, 5))
        cache.reset()
        assert torch.equal(outer(x[:, :12], past_key_values=cache).logits, logits)

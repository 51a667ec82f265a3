"""lm-eval, by its Hugging Face door, finds what the native model says: log-likelihoods and greedy texts."""

import json
import os

import pytest
import torch
from models import model

from remanence.tokenizers.tokens import ByteTokenizer

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("remanence.hf")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("REMANENCE_TEST_DEVICE", "cpu") != "cpu", reason="loads folders to the CPU"
    ),
]
CHOICES = {"choices": [" north", " south, of course", " é"]}
DOCUMENTS = [
    {"text": "Which way did the needle point?", **CHOICES, "answer": 0},
    {"text": "Grüße aus dem Süden. Which way", **CHOICES, "answer": 1},
    {"text": "A", **CHOICES, "answer": 2},
]


@pytest.fixture
def evaluated(tmp_path, request):
    """The samples of both tasks on one folder, with the native model that was saved there."""
    native = model(request.param, torch.float32, vocab_size=257)
    native.save(tmp_path / "model")
    ByteTokenizer().save(tmp_path / "model")
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(tmp_path / "documents.jsonl")},
            "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "target_delimiter": "",
    }
    choose = {
        "task": "choose",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }
    write = {
        "task": "write",
        "output_type": "generate_until",
        "doc_to_target": "",
        "metric_list": [{"metric": "exact_match"}],
    }
    write["generation_kwargs"] = {"max_gen_toks": 12, "until": ["\n\n"], "do_sample": False}
    results = lm_eval.simple_evaluate(
        HFLM(pretrained=str(tmp_path / "model"), device="cpu", batch_size=2),
        tasks=[{**common, **choose}, {**common, **write}],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    return native, results["samples"]


@pytest.mark.parametrize("evaluated", ["mac", "hybrid", "attention"], indirect=True)
@torch.no_grad()
def test_lm_eval_finds_what_the_native_model_says(evaluated):
    native, samples = evaluated
    tokenizer = ByteTokenizer()
    for document, sample in zip(
        DOCUMENTS, sorted(samples["choose"], key=lambda sample: sample["doc_id"]), strict=True
    ):
        prompt = tokenizer.encode(document["text"])
        for choice, ((found, is_greedy),) in zip(document["choices"], sample["resps"], strict=True):
            end = tokenizer.encode(choice)
            logits, state, expected, greedy = *native(torch.tensor([prompt])), 0.0, True
            for token in end:
                chances = logits[0, -1].log_softmax(-1)
                expected, greedy = expected + float(chances[token]), greedy and int(chances.argmax()) == token
                logits, state = native(torch.tensor([[token]]), state)
            assert found == pytest.approx(expected, abs=1e-4)
            assert is_greedy == greedy
    for document, sample in zip(
        DOCUMENTS, sorted(samples["write"], key=lambda sample: sample["doc_id"]), strict=True
    ):
        logits, state = native(torch.tensor([tokenizer.encode(document["text"])]))
        written = []
        for _ in range(12):
            written.append(int(logits[0, -1].argmax()))
            logits, state = native(torch.tensor([[written[-1]]]), state)
        assert sample["resps"] == [[tokenizer.decode(written)]]

"""Titans, 760M parameters, 30 billion tokens of FineWeb-Edu: the papers' pre-training, MAC; for another variant
--model.pattern=mag (mal, lmm, attention, gated_delta, ...).

remanence data prepare hf:HuggingFaceFW/fineweb-edu:sample-100BT --tokenizer tokenizer.json --out out/fineweb \\
    --workers 16
remanence train titans_760m --dry-run --gpus 8 --gpu H100
torchrun --nproc-per-node 8 -m remanence train titans_760m --out out/titans_760m --data.path=out/fineweb

The memory is the one that trains steadily (net "deep": docs/results/dynamics.md); the paper's own, whose gradients have
exploded on text here, is --model.memory.net=titans.

tokenizer.json is Llama-2's, which its owners give on request.
"""

from remanence.train import TrainConfig, pretraining


def recipe() -> TrainConfig:
    return pretraining("760m", lr=1.25e-3, billions=30)

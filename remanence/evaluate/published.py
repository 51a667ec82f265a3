"""The Titans papers' own numbers, to stand beside ours. Plain data: nothing is imported.

v1 is arXiv 2501.00663v1; what only the NeurIPS 2025 version has is marked. Tables are copied; figures 6 and 7 print no
numbers, and theirs were read off the plots. Neither version gives seeds or errors. Shares are in percent, lengths in
tokens.
"""

from __future__ import annotations

from typing import NamedTuple

Number = float | None
Numbers = tuple[Number, ...]


VOCABULARIES = {"llama-2": 32_000}
"""Tokens of the papers' tokenizers."""


class Trained(NamedTuple):
    """What a row's model was: parameters, tokens it was trained on, tokenizer. None: the papers do not say."""

    parameters: float | None
    tokens: float | None
    tokenizer: str | None = "llama-2"


# Table 1: language modelling and commonsense. 340M to 760M as v1 has them, 1.3B as NeurIPS 2025 has it. Corrected by
# the latter: MAL at 760M (HellaSwag 48.85, ARC-easy 67.61, SIQA 40.57, average 52.29). Four averages are not those of
# their rows: TTT 760M (49.37), Gated DeltaNet-H2 400M (47.80), LMM 400M (47.86), MAC 1.3B (57.20).
TABLE1_TRAINED = {
    "340M": Trained(340e6, 15e9),
    "400M": Trained(400e6, 15e9),
    "760M": Trained(760e6, 30e9),
    "1.3B": Trained(1.3e9, 100e9),
}
TABLE1_COLUMNS = (
    *("wikitext perplexity", "lambada perplexity"),
    *("lambada", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "siqa", "boolq", "average"),
)
TABLE1_COUNTS = {
    "wikitext": 62,
    "lambada": 5153,
    "piqa": 1838,
    "hellaswag": 10_042,
    "winogrande": 1267,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "siqa": 1954,
    "boolq": 3270,
}
"""How many pages or questions each benchmark has in full, as lm-evaluation-harness reads it."""
TABLE1: dict[str, dict[str, Numbers]] = {
    "340M": {
        "Transformer++": (31.52, 41.08, 30.76, 62.98, 34.76, 50.53, 45.21, 24.05, 36.81, 58.24, 42.92),
        "RetNet": (32.5, 49.73, 28.24, 62.61, 34.15, 50.91, 44.27, 23.62, 36.79, 59.72, 42.54),
        "GLA": (28.51, 43.02, 28.73, 64.05, 35.96, 50.0, 54.19, 24.29, 37.13, 58.39, 44.09),
        "Mamba": (30.83, 40.21, 29.94, 63.79, 35.88, 49.82, 49.24, 24.56, 35.41, 60.07, 43.59),
        "DeltaNet": (28.65, 47.3, 28.43, 63.52, 35.95, 49.63, 52.68, 25.37, 37.96, 58.79, 44.04),
        "TTT": (27.44, 34.19, 30.06, 63.97, 35.71, 50.08, 53.01, 26.11, 37.32, 59.83, 44.51),
        "Gated DeltaNet": (27.01, 30.94, 34.11, 63.08, 38.12, 51.6, 55.28, 26.77, 34.89, 59.54, 45.42),
        "Titans LMM": (26.18, 29.97, 34.98, 64.73, 39.61, 51.85, 55.6, 28.14, 34.52, 59.99, 46.17),
        "Titans MAC": (25.43, 28.13, 36.0, 65.32, 40.35, 51.21, 58.17, 29.0, 38.63, 60.18, 47.36),
        "Titans MAG": (25.07, 28.72, 36.71, 64.88, 40.56, 52.49, 57.72, 28.16, 39.75, 60.01, 47.54),
        "Titans MAL": (24.69, 28.8, 35.74, 64.97, 39.44, 51.97, 56.58, 28.21, 38.14, 57.32, 46.55),
    },
    "400M": {
        "Transformer++": (30.63, 37.37, 29.64, 64.27, 37.72, 51.53, 54.95, 27.36, 38.07, 61.59, 45.64),
        "RetNet": (29.92, 46.83, 29.16, 65.23, 36.97, 51.85, 56.01, 27.55, 37.3, 59.66, 45.47),
        "HGRN2": (32.33, 47.14, 26.12, 64.52, 35.45, 52.24, 55.97, 25.51, 37.35, 59.02, 44.52),
        "GLA": (27.96, 36.66, 27.86, 65.94, 37.41, 49.56, 56.01, 26.36, 38.94, 59.84, 45.24),
        "Mamba": (29.22, 39.88, 29.82, 65.72, 37.93, 50.11, 58.37, 26.7, 37.76, 61.13, 45.94),
        "Mamba2": (26.34, 33.19, 32.03, 65.77, 39.73, 52.48, 59.0, 27.64, 37.92, 60.72, 46.91),
        "DeltaNet": (27.69, 44.04, 29.96, 64.52, 37.03, 50.82, 56.77, 27.13, 38.22, 60.09, 45.57),
        "TTT": (26.11, 31.52, 33.25, 65.7, 39.11, 51.68, 58.04, 28.99, 38.26, 59.87, 46.86),
        "Gated DeltaNet": (25.47, 29.24, 34.4, 65.94, 40.46, 51.46, 59.8, 28.58, 37.43, 60.03, 47.26),
        "Samba": (25.32, 29.47, 36.86, 66.09, 39.24, 51.45, 60.12, 27.2, 38.68, 58.22, 47.23),
        "Gated DeltaNet-H2": (24.19, 28.09, 36.77, 66.43, 40.79, 52.17, 59.55, 29.09, 39.04, 58.56, 47.69),
        "Titans LMM": (25.03, 28.99, 35.21, 65.85, 40.91, 52.19, 59.97, 29.2, 38.74, 60.85, 47.83),
        "Titans MAC": (25.61, 27.73, 36.92, 66.39, 41.18, 52.8, 60.24, 29.69, 40.07, 61.93, 48.65),
        "Titans MAG": (23.59, 27.81, 37.24, 66.8, 40.92, 53.21, 60.01, 29.45, 39.91, 61.28, 48.6),
        "Titans MAL": (23.93, 27.89, 36.84, 66.29, 40.74, 52.26, 59.85, 29.71, 38.92, 58.4, 47.87),
    },
    "760M": {
        "Transformer++": (25.21, 27.64, 35.78, 66.92, 42.19, 51.95, 60.38, 32.46, 39.51, 60.37, 48.69),
        "RetNet": (26.08, 24.45, 34.51, 67.19, 41.63, 52.09, 63.17, 32.78, 38.36, 57.92, 48.46),
        "Mamba": (28.12, 23.96, 32.8, 66.04, 39.15, 52.38, 61.49, 30.34, 37.96, 57.62, 47.22),
        "Mamba2": (22.94, 28.37, 33.54, 67.9, 42.71, 49.77, 63.48, 31.09, 40.06, 58.15, 48.34),
        "DeltaNet": (24.37, 24.6, 37.06, 66.93, 41.98, 50.65, 64.87, 31.39, 39.88, 59.02, 48.97),
        "TTT": (24.17, 23.51, 34.74, 67.25, 43.92, 50.99, 64.53, 33.81, 40.16, 59.58, 47.32),
        "Gated DeltaNet": (21.18, 22.09, 35.54, 68.01, 44.95, 50.73, 66.87, 33.09, 39.21, 59.14, 49.69),
        "Samba": (20.63, 22.71, 39.72, 69.19, 47.35, 52.01, 66.92, 33.2, 38.98, 61.24, 51.08),
        "Gated DeltaNet-H2": (19.88, 20.83, 39.18, 68.95, 48.22, 52.57, 67.01, 35.49, 39.39, 61.11, 51.49),
        "Titans LMM": (20.04, 21.96, 37.4, 69.28, 48.46, 52.27, 66.31, 35.84, 40.13, 62.76, 51.56),
        "Titans MAC": (19.93, 20.12, 39.62, 70.46, 49.01, 53.18, 67.86, 36.01, 41.87, 62.05, 52.51),
        "Titans MAG": (18.61, 19.86, 40.98, 70.25, 48.94, 52.89, 68.23, 36.19, 40.38, 62.11, 52.5),
        "Titans MAL": (19.07, 20.33, 40.05, 69.99, 48.82, 53.02, 67.54, 35.65, 30.98, 61.72, 50.97),
    },
    "1.3B": {
        "Transformer++": (18.53, 18.32, 42.6, 70.02, 50.23, 53.51, 68.83, 35.1, 40.66, 57.09, 52.25),
        "RetNet": (19.08, 17.27, 40.52, 70.07, 49.16, 54.14, 67.34, 33.78, 40.78, 60.39, 52.02),
        "Mamba2": (16.56, 12.56, 45.66, 71.87, 55.67, 55.24, 72.47, 37.88, 40.2, 60.13, 54.89),
        "DeltaNet": (17.71, 16.88, 42.46, 70.72, 50.93, 53.35, 68.47, 35.66, 40.22, 55.29, 52.14),
        "Gated DeltaNet": (16.42, 12.17, 46.65, 72.25, 55.76, 57.45, 71.21, 38.39, 40.63, 60.24, 55.32),
        "Samba": (16.13, 13.29, 44.94, 70.94, 53.42, 55.56, 68.81, 36.17, 39.96, 62.11, 54.0),
        "Gated DeltaNet-H2": (15.91, 12.55, 48.76, 72.19, 56.88, 57.77, 71.33, 39.07, 41.91, 61.55, 56.18),
        "Titans LMM": (15.6, 11.41, 49.14, 73.09, 56.31, 59.81, 72.43, 40.82, 42.05, 60.97, 56.82),
        "Titans MAC": (14.98, 11.19, 49.72, 73.56, 57.1, 59.47, 72.95, 41.96, 42.12, 60.74, 57.32),
        "Titans MAL": (15.13, 11.28, 50.1, 73.29, 56.74, 59.52, 73.09, 41.37, 41.88, 61.09, 57.14),
    },
}

# Table 2: a needle in a haystack (RULER's S-NIAH): a number in noise (PK), a number (N) and a uuid (W) in essays. Samba
# and Gated DeltaNet-H2 as NeurIPS 2025 has them. The size of the models is not given.
TABLE2_TRAINED = Trained(None, None)
TABLE2_LENGTHS = (2048, 4096, 8192, 16_384)
TABLE2: dict[str, dict[str, Numbers]] = {
    "TTT": {
        "PK": (98.4, 98.8, 98.0, 88.4),
        "N": (60.2, 36.6, 10.2, 4.4),
        "W": (78.8, 28.0, 4.4, 0.0),
    },
    "Mamba2": {
        "PK": (98.6, 61.4, 31.0, 5.4),
        "N": (98.4, 55.8, 14.2, 0.0),
        "W": (42.2, 4.2, 0.0, 0.0),
    },
    "DeltaNet": {
        "PK": (96.8, 98.8, 98.6, 71.4),
        "N": (47.2, 15.4, 12.8, 5.4),
        "W": (46.2, 20.0, 1.6, 0.0),
    },
    "Titans LMM": {
        "PK": (99.8, 98.4, 98.2, 96.2),
        "N": (100.0, 99.8, 93.4, 80.2),
        "W": (90.4, 89.4, 85.8, 80.6),
    },
    "Titans MAC": {
        "PK": (99.2, 98.8, 99.0, 98.4),
        "N": (99.6, 98.2, 97.6, 97.4),
        "W": (98.2, 98.2, 95.6, 95.2),
    },
    "Titans MAG": {
        "PK": (99.4, 98.0, 97.4, 97.4),
        "N": (99.2, 98.8, 97.2, 98.6),
        "W": (98.0, 98.0, 90.2, 88.2),
    },
    "Titans MAL": {
        "PK": (98.8, 98.6, 98.8, 97.8),
        "N": (99.8, 98.1, 96.8, 96.4),
        "W": (98.0, 97.4, 92.0, 90.4),
    },
    "Samba": {
        "PK": (98.8, 98.0, 97.4, 97.2),
        "N": (98.8, 98.6, 96.2, 95.6),
        "W": (96.8, 90.0, 84.0, None),
    },
    "Gated DeltaNet-H2": {
        "PK": (99.2, 97.8, 97.4, 98.4),
        "N": (98.0, 97.8, 96.2, 95.8),
        "W": (97.4, 96.8, 88.4, None),
    },
}

# Table 3: time series, the mean squared and the mean absolute error. The paper gives neither horizons nor look-back;
# the others' values are the usual means over horizons of 96, 192, 336 and 720 rows from a look-back of 96.
TABLE3_COLUMNS = (
    *("Neural Memory", "Simba", "iTransformer", "RLinear", "PatchTST"),
    *("Crossformer", "TiDE", "TimesNet", "DLinear"),
)
TABLE3: dict[str, tuple[tuple[float, float], ...]] = {
    "ETTm1": (
        *((0.358, 0.387), (0.383, 0.396), (0.407, 0.410), (0.414, 0.407), (0.387, 0.400)),
        *((0.513, 0.496), (0.419, 0.419), (0.400, 0.406), (0.403, 0.407)),
    ),
    "ETTm2": (
        *((0.261, 0.309), (0.271, 0.327), (0.288, 0.332), (0.286, 0.327), (0.281, 0.326)),
        *((0.757, 0.610), (0.358, 0.404), (0.291, 0.333), (0.350, 0.401)),
    ),
    "ETTh1": (
        *((0.420, 0.421), (0.441, 0.432), (0.454, 0.447), (0.446, 0.434), (0.469, 0.454)),
        *((0.529, 0.522), (0.541, 0.507), (0.458, 0.450), (0.456, 0.452)),
    ),
    "ETTh2": (
        *((0.336, 0.382), (0.361, 0.391), (0.383, 0.407), (0.374, 0.398), (0.387, 0.407)),
        *((0.942, 0.684), (0.611, 0.550), (0.414, 0.427), (0.559, 0.515)),
    ),
    "electricity": (
        *((0.162, 0.261), (0.169, 0.274), (0.178, 0.270), (0.219, 0.298), (0.205, 0.290)),
        *((0.244, 0.334), (0.251, 0.344), (0.192, 0.295), (0.212, 0.300)),
    ),
    "traffic": (
        *((0.415, 0.289), (0.493, 0.291), (0.428, 0.282), (0.626, 0.378), (0.481, 0.304)),
        *((0.550, 0.304), (0.760, 0.473), (0.620, 0.336), (0.625, 0.383)),
    ),
    "weather": (
        *((0.231, 0.265), (0.255, 0.280), (0.258, 0.278), (0.272, 0.291), (0.259, 0.281)),
        *((0.259, 0.315), (0.271, 0.320), (0.259, 0.287), (0.265, 0.317)),
    ),
}

# Table 5: what the parts are worth. The first column is the mean of both perplexities of Table 1 at 400M, the second
# its average, the third the mean of Table 2's cells (found by recomputing the first four rows; the paper does not say).
TABLE5_TRAINED = Trained(400e6, 15e9)
TABLE5_COLUMNS = ("perplexity", "reasoning", "long context")
TABLE5: dict[str, Numbers] = {
    "LMM (base)": (27.01, 47.83, 92.68),
    "+ Attn MAC": (26.67, 48.65, 97.95),
    "+ Attn MAG": (25.7, 48.6, 96.7),
    "+ Attn MAL": (25.91, 47.87, 96.91),
    "linear memory": (28.49, 46.97, 85.34),
    "w/o convolution": (28.73, 45.82, 90.28),
    "w/o momentum": (28.98, 45.49, 87.12),
    "w/o weight decay": (29.04, 45.11, 85.6),
    "w/o persistent memory": (27.63, 46.35, 92.49),
}

TABLE5_VARIANTS = {
    "base": "LMM (base)",
    "linear": "linear memory",
    "no_conv": "w/o convolution",
    "no_momentum": "w/o momentum",
    "no_forget": "w/o weight decay",
    "no_persistent": "w/o persistent memory",
}
"""The lines of Table 5 by the variants' names in ``remanence eval RECIPE ablate``."""


def table5(column: str = "perplexity") -> dict[str, float]:
    """One column of Table 5, by the variants' names."""
    cells = {name: TABLE5[line][TABLE5_COLUMNS.index(column)] for name, line in TABLE5_VARIANTS.items()}
    return {name: cell for name, cell in cells.items() if cell is not None}


# Figure 6: BABILong. How many examples "few-shot" means and which tasks the mean is of, is not given.
# In the second panel Titans, Mamba and RMT are fine-tuned, the large models are not.
FIGURE6_TRAINED = Trained(None, None)
FIGURE6_LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 524_288, 1_048_576, 10_485_760)
FIGURE6: dict[str, dict[str, Numbers]] = {
    "few-shot": {
        "Titans (MAC)": (76, 76, 74, 73, 71, 70, 66, 64, 61, 53, None),
        "GPT-4": (81, 77, 74, 71, 64, 53, 43, 36, None, None, None),
        "GPT4o-mini": (72, 71, 65, 62, 60, 54, 45, 43, None, None, None),
        "Llama3.1-8B": (68, 66, 66, 62, 60, 56, 49, 39, None, None, None),
        "Gemma-9B": (71, 69, 64, 0, None, None, None, None, None, None, None),
        "RecurrentGemma-9B": (59, 57, 21, 14, 8, None, None, None, None, None, None),
        "RWKV-6-7B": (55, 48, 35, 7, None, None, None, None, None, None, None),
        "Mamba2.8B": (52, 35, 9, 0, None, None, None, None, None, None, None),
    },
    "fine-tuned": {
        "Titans (MAC)-FT": (99, 99, 99, 98, 99, 99, 97, 98, 95, 94, 69),
        "Mamba-FT": (99, 99, 99, 99, 99, 98, 96, 92, None, None, None),
        "RMT-FT": (97, 95, 92, 90, 86, 78, 70, 59, 46, 43, 34),
        "Qwen2.5-72B": (78, 76, 75, 73, 71, 68, 66, 58, None, None, None),
        "Llama3.1-70B": (81, 78, 74, 70, 65, 59, 53, 45, None, None, None),
        "GPT-4": (81, 77, 74, 71, 64, 53, 43, 36, None, None, None),
        "GPT4o-mini": (72, 71, 65, 62, 60, 54, 45, 43, None, None, None),
        "Llama3.1-8B + RAG": (48, 47, 46, 45, 45, 44, 42, 45, 42, 39, 37),
    },
}


def figure6(panel: str) -> dict[str, list[tuple[int, float]]]:
    """Every line of a panel of Figure 6, "few-shot" or "fine-tuned", as its points: tokens and per cent."""
    return _points(FIGURE6_LENGTHS, FIGURE6[panel])


# NeurIPS appendix G.1: BABILong after fine-tuning. ARMT, with 137M parameters, is Rodkin et al.'s (2024).
BABILONG_LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 524_288, 1_048_576, 10_485_760)
BABILONG: dict[str, Numbers] = {
    "ARMT": (98, 98, 98, 98, 98, 98, 97, 95, 93, 77),
    "GPT2 + MAC + MAL": (99, 99, 98, 97, 98, 96, 96, 95, 94, 79),
}


def babilong() -> dict[str, list[tuple[int, float]]]:
    """Every model of the appendix as its points: tokens and per cent."""
    return _points(BABILONG_LENGTHS, BABILONG)


# Figure 7: perplexity on a part of the Pile by length, for memories of one to four layers.
FIGURE7_TRAINED = {"170M": Trained(170e6, None), "360M": Trained(360e6, None), "760M": Trained(760e6, None)}
FIGURE7_LENGTHS = (2048, 4096, 8192, 16_384, 32_768)
FIGURE7: dict[str, dict[str, Numbers]] = {
    "170M": {
        "Mamba": (16.26, 16.2, 16.35, 16.6, 17.8),
        "depth 1": (16.02, 15.89, 15.83, 15.85, 16.1),
        "depth 2": (15.5, 15.37, 15.33, 15.4, 15.47),
        "depth 3": (15.3, 15.24, 15.19, 15.22, 15.29),
        "depth 4": (15.28, 15.27, 15.23, 15.25, 15.27),
    },
    "360M": {
        "Mamba": (13.18, 13.05, 12.82, 13.14, 13.44),
        "depth 1": (13.19, 13.02, 12.7, 12.71, 12.75),
        "depth 2": (13.22, 12.85, 12.49, 12.48, 12.51),
        "depth 3": (13.21, 12.81, 12.35, 12.33, 12.41),
        "depth 4": (13.26, 12.8, 12.31, 12.29, 12.3),
    },
    "760M": {
        "Mamba": (10.61, 10.42, 10.39, 10.53, 10.64),
        "depth 1": (10.52, 10.24, 10.04, 9.94, 9.95),
        "depth 2": (10.49, 10.15, 9.8, 9.66, 9.64),
        "depth 3": (10.49, 10.05, 9.74, 9.62, 9.6),
        "depth 4": (10.5, 10.02, 9.7, 9.63, 9.59),
    },
}


def figure7(size: str) -> dict[str, list[tuple[int, float]]]:
    """Every line of a panel of Figure 7, "170M", "360M" or "760M", as its points: tokens and perplexity."""
    return _points(FIGURE7_LENGTHS, FIGURE7[size])


def nearest(sizes: dict[str, Trained], parameters: float) -> str:
    """The size whose parameters are nearest to so many."""
    return min(sizes, key=lambda size: abs((sizes[size].parameters or 0) - parameters))


def _points(lengths: tuple[int, ...], lines: dict[str, Numbers]) -> dict[str, list[tuple[int, float]]]:
    return {
        name: [(length, cell) for length, cell in zip(lengths, cells, strict=True) if cell is not None]
        for name, cells in lines.items()
    }

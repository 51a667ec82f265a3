"""Registration of `remanence.dna` with the core package. Does not import torch."""

from remanence.verticals import Format, Vertical

VERTICAL = Vertical(
    name="dna",
    data_configs={
        "genome": "remanence.dna.config:GenomeData",
        "dna": "remanence.dna.config:DnaData",
    },
    sources={
        "genome": "remanence.dna.task:make_genome_source",
        "dna": "remanence.dna.task:make_label_source",
    },
    evaluations={"dna": "remanence.dna.evaluation:Dna"},
    tokenizers=("remanence.dna.alphabet:read_dna_json",),
    formats=(
        Format(
            name="FASTA",
            # .faa files contain proteins. They are listed so that reading one raises an error that names the line.
            suffixes=(".fa", ".fasta", ".fna", ".fas", ".ffn", ".frn", ".faa"),
            documents="remanence.dna.fasta:read_documents",
        ),
    ),
    moved={
        "remanence.tokenizers.dna": "remanence.dna.alphabet",
        "remanence.core.dna": "remanence.dna.alphabet",
        "remanence.data.fasta": "remanence.dna.fasta",
        "remanence.data.labelled": "remanence.dna.labelled",
        "remanence.tasks.dna": "remanence.dna.task",
        "remanence.evaluate.dna": "remanence.dna.evaluation",
    },
)
"""Data kinds, evaluation, tokenizer and file format that this package adds to the core package."""

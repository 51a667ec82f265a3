"""What `remanence.dna` registers. Imports no torch."""

from remanence.verticals import Format, Vertical

VERTICAL = Vertical(
    name="dna",
    data_configs={
        "genome": "remanence.dna.config:GenomeData",
        "dna": "remanence.dna.config:DnaData",
    },
    sources={
        "genome": "remanence.dna.task:genome_source",
        "dna": "remanence.dna.task:class_source",
    },
    evaluations={"dna": "remanence.dna.evaluation:Dna"},
    tokenizers=("remanence.dna.alphabet:read_dna_json",),
    formats=(
        Format(
            name="FASTA",
            # The last is a protein's: it is refused with its line, as any file that is no DNA.
            suffixes=(".fa", ".fasta", ".fna", ".fas", ".ffn", ".frn", ".faa"),
            documents="remanence.dna.fasta:documents",
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

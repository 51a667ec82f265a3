"""What `remanence.dna` registers. Imports no torch."""

from remanence.verticals import Format, Kind, Vertical

STRETCH = 128
"""The most pieces that a row reads on from one place, where rows carry their memory."""

VERTICAL = Vertical(
    name="dna",
    kinds={
        "genome": Kind(
            source="remanence.dna.task:genome_source",
            fields=("path", "held_out", "reverse_complement"),
            carries=True,
            pieces=STRETCH,
        ),
        "dna": Kind(
            source="remanence.dna.task:class_source",
            fields=("path", "held_out", "weight", "reverse_complement"),
            evaluation="dna --dna.data=FOLDER",
        ),
    },
    config_fields={"data": "remanence.dna.config:DataFields"},
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

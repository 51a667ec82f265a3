"""DNA: an alphabet's tokenizer, FASTA files and tables of sequences, pretraining and classification, evaluation."""

"""DNA: tokenizer, readers of FASTA files and labelled tables, pretraining, classification and evaluation."""

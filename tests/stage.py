"""What the commands of README and docs name: books, data sets and a model, all tiny, in one folder."""

import gzip
import io
import json
import random
import tarfile
import zipfile

import numpy as np
import zstandard
from models import pairs_tokenizer

FACT = "The number of the silent harbor is 4170283."
PLACES = ("hallway", "kitchen", "garden", "office")


def set_up(home):
    """Every file that a block reads and no block before it has written."""
    chance = random.Random(0)
    words = [f"It was the {number}th day of the long journey over the sea. " for number in range(120)]
    (home / "book.txt").write_text(f"{FACT}\n{''.join(words)[:6000]}")
    for folder in ("books", "more-books"):
        (home / folder).mkdir(parents=True)
        for number in range(9):
            (home / folder / f"{number}.txt").write_text("".join(chance.sample(words, 100)))
    note = json.dumps({"text": "A note. " * 20}) + "\n"
    (home / "notes.jsonl.zst").write_bytes(zstandard.compress(note.encode()))
    pairs_tokenizer(home / "tokenizer.json")
    (home / "wiki.test.raw").write_text(" = Page = \n \n The ship was lost at sea . \n")
    (home / "lambada_openai.jsonl").write_text(json.dumps({"text": "the cat sat on the mat"}) + "\n")
    _parquet(home / "fineweb-edu" / "sample" / "10BT", words)
    _stories(home / "tasks_1-20_v1-2.tar.gz", chance)
    _genomes(home, chance)
    _series(home)


def _parquet(folder, words):
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True)
    parquet.write_table(pyarrow.table({"text": words}), folder / "000_00000.parquet")


def _stories(path, chance):
    """bAbI's qa1 to qa20, all alike: who went where."""
    lines = []
    for _ in range(4):
        place = chance.choice(PLACES)
        lines += [f"1 Mary went to the {chance.choice(PLACES)}.", f"2 John went to the {place}."]
        lines += [f"3 Where is John? \t{place}\t2"]
    text = ("\n".join(lines) + "\n").encode()
    with tarfile.open(path, "w:gz") as archive:
        for task in range(1, 21):
            for split in ("train", "test"):
                entry = tarfile.TarInfo(f"tasks_1-20_v1-2/en/qa{task}_who-is-where_{split}.txt")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))


def _genomes(home, chance):
    for name in ("genome.fna.gz", "other.fna.gz"):
        bases = "".join(chance.choices("ACGT", k=6000))
        (home / name).write_bytes(gzip.compress(f">record\n{bases}\n".encode()))
    folder = home / "GUE" / "prom" / "prom_300_tata"
    folder.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        rows = [f"{''.join(chance.choices('ACGT', k=20))},{number % 2}" for number in range(8)]
        (folder / f"{split}.csv").write_text("\n".join(["sequence,label", *rows]) + "\n")


def _series(home):
    """Two channels, in the place of ETTh1's seven, and a tenth of its rows."""
    time = np.arange(1500)[:, None]
    values = np.sin(time / np.array([[3.0, 7.0]])).round(3)
    rows = "\n".join(f"2016-07-01,{first},{second}" for first, second in values)
    text = f"date,HUFL,OT\n{rows}\n"
    (home / "ETTh1.csv").write_text(text)
    (home / "mine.csv").write_text(text)
    with zipfile.ZipFile(home / "ETT-small.zip", "w") as archive:
        archive.write(home / "ETTh1.csv", "ETTh1.csv")

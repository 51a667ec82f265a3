"""More passages with their questions, small talk and phrases, read from the text files in `facts/`.

`facts/passages_*.txt` is written as in `relations.py` ("P text", then "slot: q|q|q => a|a" or "slot @macro"), with
``\\n`` for a new line, and `facts/passage_macros.txt` as "name: q|q|q => a|a" with {*} for the slot. In the pools of
`facts/passage_pools.txt`, # is a digit, @ a capital letter, and {name} is drawn from another pool.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.attach import relations

Rng = np.random.Generator
FACTS = Path(__file__).parent / "facts"


def _lines(name: str) -> list[str]:
    lines = (FACTS / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("// ")]


def _pool(items: list[str]) -> Callable[[Rng], str]:
    """Draws an item and replaces its signs."""

    def draw(rng: Rng) -> str:
        item = items[int(rng.integers(len(items)))]
        item = re.sub(r"{(\w+)}", lambda m: str(relations.pool_draw(rng, _own(m[1]))), item)
        item = re.sub(r"(?<![\d#])#", lambda _: str(rng.integers(2, 10)), item)
        item = re.sub("#", lambda _: str(rng.integers(10)), item)
        return re.sub("@", lambda _: "ABCDEFGHJKLMNPRSTUVWXYZ"[int(rng.integers(23))], item)

    return draw


def _own(pool: str) -> str:
    """The key in `relations.POOLS`: pools of this module have a prefix, so that no other pool of that name is lost."""
    return f"passage {pool}" if pool in POOLS else pool


def _read(name: str) -> list[relations.Passage]:
    parsed = relations._parse_passages("\n".join(_lines(name)))
    pools = lambda p: {slot: _own(pool) for slot, pool in p.slots.items()}
    return [p._replace(text=p.text.replace("\\n", "\n"), slots=pools(p)) for p in parsed]


def _section(name: str) -> tuple[str, ...]:
    """The lines of `dialogues.txt` under "== name"."""
    text = "\n".join(_lines("dialogues.txt"))
    found = re.search(rf"^== {name}\n(.*?)(?=^== |\Z)", text, flags=re.M | re.S)
    assert found, name
    return tuple(found[1].strip().split("\n"))


POOLS = {name: items.split("|") for name, items in (x.split(": ", 1) for x in _lines("passage_pools.txt"))}
relations.POOLS.update({_own(name): _pool(items) for name, items in POOLS.items()})
relations._MACROS.update(dict(x.split(": ", 1) for x in _lines("passage_macros.txt")))

PASSAGES_TRAIN = tuple(p for file in sorted(FACTS.glob("passages_*.txt")) for p in _read(file.name))
SMALLTALK = tuple((remark, reply) for remark, reply in (x.split(" | ", 1) for x in _section("SMALLTALK")))
UNKNOWN, ACKS, READ, DONE = map(_section, ("UNKNOWN", "ACKS", "READ", "DONE"))


def _has(text: str, value: str) -> bool:
    """Whether the value stands in the text as whole words; a first letter may be in the other case."""
    first = re.escape(value[0].lower() + value[0].upper())
    return bool(re.search(rf"(?<!\w)[{first}]{re.escape(value[1:])}(?!\w)", text))


def check(rng: Rng, draws: int = 5) -> list[str]:
    """Draws each passage and names what is wrong."""
    few = lambda name: len({relations.pool_draw(rng, _own(name)) for _ in range(600)}) < 40
    problems = [f"few items in pool {name}" for name in POOLS if few(name)]
    texts = [p.text for p in PASSAGES_TRAIN + relations.PASSAGES_TRAIN + relations.PASSAGES_HELD]
    problems += [f"twice: {text[:60]!r}" for text in set(texts) if texts.count(text) > 1]
    for p in PASSAGES_TRAIN:
        where = repr(p.text[:50])
        asked = [slot for slot, _, _ in p.questions]
        if not 3 <= len(p.slots) <= 8 or len(asked) < 3 or len(set(asked)) < len(asked):
            problems.append(f"{where}: {len(p.slots)} slots, asked {asked}")
        missing = [pool for pool in p.slots.values() if pool not in relations.POOLS]
        if missing or not set(asked) <= set(p.slots):
            problems.append(f"{where}: no pool {missing} or slot {set(asked) - set(p.slots)}")
            continue
        for slot, questions, answers in p.questions:
            if len(set(questions)) < 3 or len(set(answers)) < 2 or any(q[-1] != "?" for q in questions):
                problems.append(f"{where}: wordings of {slot}")
            problems += [f"{where}: question {q!r}" for q in questions if "{" + slot + "}" in q]
            problems += [f"{where}: answer {a!r}" for a in answers if "{" + slot + "}" not in a]
        for _ in range(draws):
            drawn = relations.draw_passage(rng, p)
            whole = [drawn["text"], *(qa["question"] + qa["answer_full"] for qa in drawn["qas"])]
            problems += [f"{where}: not filled {text!r}" for text in whole if re.search(r"[{}#@]", text)]
            for qa in drawn["qas"]:
                value = drawn["values"][qa["slot"]]
                if not _has(drawn["text"], value) or not _has(qa["answer_full"], qa["answer_short"]):
                    problems.append(f"{where}: {value!r} not in {qa['answer_full']!r} or {drawn['text']!r}")
                if _has(qa["question"], value):
                    problems.append(f"{where}: {value!r} in {qa['question']!r}")
    return problems


if __name__ == "__main__":
    rng = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for index in rng.permutation(len(PASSAGES_TRAIN))[:4]:
        drawn = relations.draw_passage(rng, PASSAGES_TRAIN[index])
        print(
            "\n" + drawn["text"], *(q["question"] + " " + q["answer_full"] for q in drawn["qas"]), sep="\n  "
        )
    found = check(rng)
    print("\nsmall talk, unknown, acks, read, done:", *map(len, (SMALLTALK, UNKNOWN, ACKS, READ, DONE)))
    asked = [questions for p in PASSAGES_TRAIN for _, questions, _ in p.questions]
    print(f"passages {len(PASSAGES_TRAIN)}, slots {len(asked)}, questions {sum(map(len, asked))}")
    print(f"pools {len(POOLS)}, problems {len(found)}", *found, sep="\n")
    sys.exit(bool(found))

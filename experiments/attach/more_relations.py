"""More facts: relations and pools of facts/*.txt in the format of relations.py; running the module checks them."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.attach import relations as base
from experiments.attach.relations import Relation, _pick

FACTS = Path(__file__).parent / "facts"
Draw = Callable[[np.random.Generator], str]


def _int(rng: np.random.Generator, lo: int, hi: int) -> int:
    return int(rng.integers(lo, hi))


def _chars(rng: np.random.Generator, alphabet: str, n: int) -> str:
    return "".join(_pick(rng, alphabet) for _ in range(n))


def _number(lo: int, hi: int, step: int, form: str) -> Draw:
    """Strings such as '35 days': step times a number in [lo, hi), put into form."""
    return lambda rng: form.format(f"{_int(rng, lo, hi) * step:,}")


def _name(rng: np.random.Generator, endings: str) -> str:
    """An invented name of two or three syllables."""
    onset = base._w("b br c d dr f g gl h k l m n p qu r s sk t th tr v w y z")
    vowel = base._w("a e i o u ae ia or an el en ar il")
    body = "".join(_pick(rng, onset) + _pick(rng, vowel) for _ in range(_int(rng, 1, 3)))
    return (body + _pick(rng, endings.split())).capitalize()


_UPPER = "BCDEFGHJKLMNPQRSTVWXYZ"
GENERATED: dict[str, Draw] = {
    "ip": lambda rng: f"10.{_int(rng, 0, 256)}.{_int(rng, 0, 256)}.{_int(rng, 2, 255)}",
    "version": lambda rng: f"{_int(rng, 1, 20)}.{_int(rng, 0, 30)}.{_int(rng, 0, 10)}",
    "code": lambda rng: f"{_chars(rng, _UPPER, 3)}-{_chars(rng, '23456789' + _UPPER, 4)}",
    "short_code": lambda rng: f"{_chars(rng, _UPPER, 2)}{_int(rng, 10, 1000)}",
    "hexid": lambda rng: _chars(rng, "0123456789abcdef", 7),
    "token": lambda rng: _chars(rng, "abcdefghjkmnpqrstuvwxyz23456789", 10),
    "weekday_time": lambda rng: f"{_pick(rng, base.DAY)} at {base._time(rng)}",
    "weekday_evening": lambda rng: f"{_pick(rng, base.DAY)} at {base._hours(5, 10, 'pm')(rng)}",
    "office_time": lambda rng: f"{_pick(rng, base.DAY)} at {_int(rng, 8, 18)}:{_int(rng, 0, 6)}0",
    "noon": lambda rng: f"{_int(rng, 10, 15)}:{_int(rng, 0, 12) * 5:02d}",
    "song_time": lambda rng: f"{_int(rng, 2, 9)}:{_int(rng, 10, 60)}",
    "future_date": lambda rng: f"{base._date(rng)}, {_int(rng, 2026, 2036)}",
    "fare": lambda rng: f"${_int(rng, 1, 30)}.{_int(rng, 1, 10)}0",
    "clock": lambda rng: f"{_int(rng, 6, 23)}:{_pick(rng, ('00', '10', '15', '25', '30', '45', '55'))}",
    "full_date": lambda rng: f"{base._date(rng)}, {_int(rng, 1960, 2026)}",
    "score": lambda rng: f"{_int(rng, 0, 9)} to {_int(rng, 0, 9)}",
    "hardwords": lambda rng: f"{_pick(rng, base.ADJ)}-{_pick(rng, base.NOUN)}-{_int(rng, 10, 100)}",
    "email": lambda rng: (
        f"{_pick(rng, base.FIRST)}.{_pick(rng, base.LAST)}@{_pick(rng, base.BRAND)}.com".lower()
    ),
    "phone": lambda rng: f"0{_int(rng, 100, 1000)} {_int(rng, 100, 1000)} {_int(rng, 1000, 10000)}",
    "host": lambda rng: f"{_pick(rng, base.NOUN)}-{_int(rng, 1, 60):02d}",
    "dims": lambda rng: f"{_int(rng, 4, 40) * 5} by {_int(rng, 4, 40) * 5} cm",
    "fkey": lambda rng: f"F{_int(rng, 1, 13)}",
    "bar": lambda rng: f"{_int(rng, 18, 40) / 10} bar",
    "shelf": lambda rng: f"row {_int(rng, 2, 40)}, shelf {_chars(rng, 'BCDEFGH', 1)}",
    "invented": lambda rng: _name(rng, "a on is or eth un ax ilo mar dor ven ash"),
    "planet": lambda rng: _name(rng, "a os us ion ar ix") + _pick(rng, (" Prime", " Minor", "", "-4")),
    "substance": lambda rng: _name(rng, "ite ium ine ane ol ate ozide").lower(),
    "inv_country": lambda rng: _name(rng, "ia land aria stan ovia esh mark"),
    "inv_person": lambda rng: f"{_name(rng, 'a o us en is')} {_name(rng, 'er ov ell ard ini son wick')}",
}


def _read_lines(path: Path) -> list[list[str]]:
    return [line.split(":", 1) for line in path.read_text().splitlines() if line.strip()]


TEXT_POOLS: dict[str, list[str]] = {name: base._p(items) for name, items in _read_lines(FACTS / "pools.txt")}
for _pool, _row in _read_lines(FACTS / "numbers.txt"):  # name: lo hi step form
    _lo, _hi, _step, _form = _row.split(maxsplit=3)
    GENERATED[_pool] = _number(int(_lo), int(_hi), int(_step), _form)
for _new in (TEXT_POOLS, GENERATED):
    if clash := _new.keys() & base.POOLS.keys():
        raise ValueError(f"pools defined twice: {sorted(clash)}")
    base.POOLS.update(_new)
TRAIN: list[Relation] = [
    r for path in sorted(FACTS.glob("relations_*.txt")) for r in base._parse_relations(path.read_text())
]
_names = {i.split()[0] for p in (*TEXT_POOLS.values(), base.FIRST, base.LAST) for i in p}
_openings = {t.split()[0] for r in TRAIN for t in r.statements + r.updates} - _names
base._LOWER_FIRST |= {w for w in _openings if w.isalpha() and w[1:].islower()}  # for with_prefix


def check(rng: np.random.Generator, draws: int = 5) -> list[str]:
    """Faults of form: those relations.check finds (also against the held-out relations) and those of drawn facts."""
    problems = [f"pool {n}: items" for n, p in TEXT_POOLS.items() if len(set(p)) < max(40, len(p))]
    problems += [f"{i}: id of relations.py" for i in {r.id for r in base.TRAIN} & {r.id for r in TRAIN}]
    kept, base.TRAIN = base.TRAIN, tuple(TRAIN)
    problems, base.TRAIN = problems + base.check(rng), kept
    for r in TRAIN:
        for _ in range(draws):
            d = base.draw(rng, r)
            value = re.compile(rf"(?<!\w){re.escape(d['value'])}(?!\w)", re.I)
            texts = [d[k] for k in ("statement", "question", "answer_full", "reverse") if d[k]]
            texts.append(d["update"](base.draw_value2(rng, r, d["value"])))
            problems += [f"{r.id}: unfilled {t!r}" for t in texts if re.search(r"[{}|]|  ", t)]
            if not value.search(d["statement"]):
                problems.append(f"{r.id}: no {d['value']!r} in {d['statement']!r}")
            if value.search(re.sub(re.escape(d["subject"]) or "$^", "", d["question"], flags=re.I)):
                problems.append(f"{r.id}: {d['value']!r} in {d['question']!r}")
    return problems


if __name__ == "__main__":
    found = check(np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
    counts = (
        f"{len(TRAIN)} relations ({sum(r.subject == 'me' for r in TRAIN)} me), {len(TEXT_POOLS)} text pools"
    )
    print(f"{counts}, {len(GENERATED)} generated, problems: {len(found)}", *found, sep="\n")

"""Words that facts are made of: the names of subjects, and values.

Words that are held out never occur in training, neither in facts nor in generated text. They are for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remanence.tasks.needle import ADJECTIVES as NEEDLE_ADJECTIVES
from remanence.tasks.needle import NOUNS as NEEDLE_NOUNS


class Words(NamedTuple):
    """The words of a kind for training, and those that are held out for tests."""

    trained: tuple[str, ...]
    held_out: tuple[str, ...]


_HELD_OUT = {
    "adjectives":
        "green broken lonely purple wooden distant ruined fearless hollowed muffled tangled drowsy gleaming "
        "haunted jagged rolling sullen thorny weathered",
    "nouns":
        "bottle tower painter river clock village beaver chandelier dungeon gondola hermit jasmine kiosk laundry "
        "monument nectar otterhound pavilion rooster scroll",
    "first names":
        "Alice Peter Maria John Emma David Ottilie Bertram Ravi Lucinda Matilda Fergus Ines Tomas Yolanda Kofi",
    "last names":
        "Warner Novak Lopez Carter Fischer Stone Hargreaves Villanueva Oakley Brennan Ferrari Lindgren Mbeki "
        "Tolliver Quist Radcliffe",
    "cities":
        "Krakow Nantes Tripoli Calgary Osijek Palermo Leipzig Caracas Khartoum Brisbane Innsbruck Galway",
    "colours":
        "green purple turquoise magenta lavender mustard",
    "animals":
        "hedgehog ferret peacock gazelle walrus panther",
    "jobs":
        "painter translator blacksmith astronomer locksmith mason",
    "foods":
        "pancakes apricots dumplings lentils walnuts sherbet",
    "counts":
        "thirteen seventy ninety",
}  # fmt: skip
HELD_OUT = frozenset(" ".join(_HELD_OUT.values()).lower().split())
"""All words that are held out, in lower case."""


def _words(kind: str, trained: str, more: Sequence[str] = ()) -> Words:
    """Make the `Words` of a kind from words separated by spaces. What any kind holds out is removed."""
    words = [word for word in [*trained.split(), *more] if word.lower() not in HELD_OUT]
    return Words(tuple(dict.fromkeys(words)), tuple(_HELD_OUT.get(kind, "").split()))


ADJECTIVES = _words(
    "adjectives",
    "able absent active aged alert alien alpine amused angry annual arctic arid ashen awake awkward bare basic "
    "beloved bent big bitter bleak blind blunt bony boring bright brief brittle broad bronze burning bustling busy "
    "careful careless charming cheap cheerful chilly civil clean clear cloudy clumsy coarse coastal cold common "
    "compact complex cool coral cosmic costly cosy cracked crazy creamy crimson crisp crooked crowded cruel cunning "
    "curly damp dark deaf dear decent deep deserted dirty dismal distinct double drab dreary dry dull dutiful early "
    "earthen elastic elder elegant empty endless enormous equal evil exact exotic expert faded fair faithful false "
    "famous fancy fat favourite feeble fertile festive fiery final fine first fixed flat flawed floating floral "
    "fluffy flying foggy foolish foreign formal fragile frail free fresh friendly frozen fruity full funny furry "
    "gallant giant gifted glad gloomy glossy graceful grand granite grassy gray great greedy grim guilty hairy handy "
    "happy hard harsh hasty healthy heavy hidden high hilly holy honest hot huge hungry idle ideal inner innocent "
    "iron jealous joyful junior just kind lame large last late lazy leafy lean left light likely little local lone "
    "long loose lost loud loyal lucky lunar magic main marble marine massive mean mellow mild milky minor misty "
    "mobile modern modest moist moral muddy murky musical mute mysterious naive narrow nasty native naval near neat "
    "nervous new nice nimble nocturnal noisy northern numb oak obscure odd oily old open orderly ornate outer oval "
    "painted paper patient peaceful perfect petty pink pious plump polar polite polished poor popular pretty prime "
    "private public pure quaint queer ragged rainy rare raw ready real red regal remote rich rigid ripe roasted "
    "robust rocky rosy rotten rough round royal rude rural sacred sad safe salty sandy savage scarce scarlet secret "
    "senior serene severe shabby shady shaky shallow shiny short shy sick simple single skilled sleepy slender slim "
    "slippery slow small smart smoky smooth snowy social soft solar solid sore sour southern spare special spicy "
    "spotted square stable stale stark starry stately sticky stiff still stony stormy straight strange strict strong "
    "sturdy subtle sudden sunken sunny super supreme sweet tall tame tart tasty tender tense thick thin third tidy "
    "tight tiny tired torn tough tragic trim true ugly unique united upper urban useful useless usual vacant vague "
    "vain valid vast velvet violent virtual vital warm wary waxen weak wealthy weary western wet white wicked wide "
    "wild windy winged wise witty woolen worthy wrong yellow young zealous",
    NEEDLE_ADJECTIVES,
)  # fmt: skip
"""Adjectives."""

NOUNS = _words(
    "nouns",
    "abbey acorn actor album alley almond altar ankle apple apron arch archer armour arrow artist attic author avenue "
    "axe bacon bag baker bakery balcony ball balloon bandage banjo bank banner bark barn basin basket bath bay beach "
    "bead bean bear beard bed bee beetle bell belt bench berry bicycle bird biscuit blanket boat bone book boot "
    "border bow bowl box boy bracelet branch brass bread brick bride broom brush bucket bulb bull bus bush butcher "
    "butter button cabin cabinet cable cafe cage cake camel camera camp canal cane cannon canoe cap cape captain car "
    "card cargo carpet carriage cart cat cathedral cave cellar chain chair chalk chapel chart cheese chest chicken "
    "chimney choir church cinema circus city clay clerk cliff cloak cloth cloud coach coal coast coat coffee coffin "
    "coin collar college colonel column comb compass cook cord cork corn corner cottage couch court cow crab cradle "
    "crane crown cup cupboard curtain cushion dam dancer deck deer desert desk diamond diary dish doctor dog doll "
    "donkey door dove drawer dress drum duck duke eagle ear earl egg elbow elephant elm envelope estate fan farm "
    "farmer fence fern ferry field finger fire fish fisherman flag flame flask flower flute fly folder forge fork "
    "fort fountain fox frame friar frog fruit gallery gate general ghost giraffe girl glass glove goat goose grain "
    "grape grave guard guitar gun hall hat hawk hedge helmet hen herb hill hive hook horn horse hospital hotel house "
    "hunter hut idol inn insect ivy jacket jail jar jewel judge jug juggler key king kitchen kite knife knight lace "
    "lake lamb lamp lane lawyer leaf lemon letter library lid lighthouse lily lion lizard loaf lock locker log "
    "machine maid mail mansion map market mask mast master mat mayor medal melon merchant mill miner minister "
    "mistress mole monk monkey moon moose motor mountain mouse museum nail napkin nest net nurse oak oar oven owl ox "
    "palace pan parcel park parlour parrot path pearl peasant pen pencil piano picture pier pig pigeon pillow pilot "
    "pin pine pipe pirate plain planet plant plate plough plum pocket poet pond pony pool port porter post pot potter "
    "prince prison pump purse quarry queen quilt rabbit rail ram ranch razor reef ribbon rice ring road robe robin "
    "rock roof room root rope rose rug sack sailor salmon salt sandal saw scarf school sculptor seal seat servant "
    "shed sheep shelf shell shepherd ship shirt shoe shop shore shovel shrine silk singer sister sledge snail snake "
    "soap soldier spade sparrow spear spider sponge spoon square squire stable stair stall star station statue stone "
    "stool store storm stove stream street sugar suit sword table tailor tank tavern teacher tent theatre thorn "
    "thread throne tiger tin toad tomb tool torch town toy track train tray tree trout truck trumpet tub tulip turkey "
    "turtle uncle valve van vase vault veil vessel vine waggon waiter wall wallet warehouse wasp watch water wave "
    "well whale wharf wheat wheel widow wine wing wire witch wolf wood wool workshop yacht yard",
    NEEDLE_NOUNS,
)  # fmt: skip
"""Nouns."""

FIRST_NAMES = _words(
    "first names",
    "Aaron Abel Ada Adam Adela Adrian Agatha Agnes Albert Alan Alma Amelia Amos Amy Andrew Angela Anna Anton Arthur "
    "Astrid Audrey Barbara Basil Beatrice Benjamin Bernard Bertha Boris Brenda Brian Bruno Camilla Carla Carlos "
    "Caroline Cecil Celia Charles Chloe Christine Clara Claude Clement Colin Conrad Cora Cyril Daisy Daniel Daphne "
    "Deborah Dennis Diana Diego Dmitri Donald Dora Doris Dorothy Edgar Edith Edmund Edward Edwin Eileen Elena Elias "
    "Elijah Elizabeth Ella Ellen Elsa Emil Emily Enid Eric Ernest Esther Ethel Eugene Eva Evelyn Fanny Farid Felix "
    "Fiona Flora Florence Frances Frank Fred Frida Gabriel George Gerald Gilbert Giles Gloria Gordon Grace Greta "
    "Gustav Gwen Hannah Harold Harriet Harry Hassan Hazel Helen Henry Herbert Hilda Homer Horace Howard Hubert Hugo "
    "Ida Ingrid Irene Iris Isaac Isabel Ivan Ivor Jacob James Jamal Jane Janet Jasper Jean Jennifer Jeremy Jerome "
    "Joan Joel Jonas Joseph Joyce Judith Julia Julian Karen Karin Karl Kate Kenneth Klara Laura Lawrence Lena Leo "
    "Leonard Leroy Leslie Lewis Lillian Linda Louis Louise Lucas Lucy Luther Lydia Mabel Magda Marcel Margaret Marian "
    "Mark Martha Martin Mary Matthew Maud Maurice Max Maya Melissa Michael Mildred Milton Miriam Molly Monica Morris "
    "Moses Myra Nadia Nancy Naomi Neil Nina Noah Nora Norman Olga Olive Oliver Oscar Otto Pamela Patrick Paul Paula "
    "Pearl Percy Petra Philip Phoebe Phyllis Priscilla Quentin Rachel Ralph Ramona Raymond Rebecca Reginald Rhoda "
    "Richard Robert Roger Roland Rosa Rose Rudolf Rupert Ruth Samir Samuel Sandra Sarah Sebastian Selma Sheila Sidney "
    "Sigrid Silas Simon Sofia Stanley Stella Stephen Susan Sybil Tamara Tessa Theodore Theresa Thomas Timothy Tobias "
    "Ursula Valerie Vera Vernon Victor Vincent Viola Virginia Vivian Walter Wanda Wendy Wilfred William Winifred "
    "Xavier Yara Yusuf Yvonne Zelda Zoltan",
)  # fmt: skip
"""First names."""

LAST_NAMES = _words(
    "last names",
    "Abbott Adams Alden Allen Anders Archer Arnold Ashby Atkins Bailey Baker Ballard Banks Barlow Barnes Barton Bates "
    "Baxter Becker Bell Bennett Berg Bishop Blake Bowen Boyd Bradley Brandt Brewer Briggs Brooks Bryant Burke Burton "
    "Butler Byrne Calder Cameron Castro Chandra Chapman Clarke Clayton Cole Collins Connor Cooper Costa Craig Crane "
    "Crawford Cross Curtis Dalton Darwin Dawson Dean Dickson Dixon Doyle Drake Dubois Dunbar Duncan Eastwood Edwards "
    "Ellis Ellison Emerson Eriksen Evans Farrell Ferguson Fleming Fletcher Flores Ford Foster Fowler Fraser Freeman "
    "Frost Fuller Garner Garrett Gibson Gilmore Glover Gomez Goodwin Gould Graham Grant Graves Gray Green Griffin "
    "Gupta Haas Hale Hamilton Hansen Harding Harper Harris Hartley Harvey Hayes Heath Henson Herrera Hicks Hoffman "
    "Holloway Holmes Hopkins Horton Howell Hudson Hughes Hunt Hunter Ingram Irving Ivanov Jackson Jensen Jordan "
    "Kaplan Keller Kelly Kemp Kent Kerr Klein Knox Kowalski Kramer Lambert Larsen Lawson Lehmann Leigh Lindqvist "
    "Lloyd Logan Lowe Lynch MacLeod Malone Manning Marsh Martinez Mason Maxwell Mendes Mercer Meyer Miller Mills "
    "Mitchell Monroe Moore Moreau Morgan Morton Moss Murphy Nash Nelson Newman Nichols Nielsen Norris Norton OBrien "
    "Okafor Oliver Osborne Owens Palmer Parker Patel Payne Pearson Perkins Petrov Phillips Pierce Porter Potter "
    "Powell Pratt Quigley Ramsey Reed Reyes Rhodes Richter Riley Rivera Roberts Rogers Romero Ross Rossi Rowe Russell "
    "Ryan Salazar Sanders Santos Sato Savage Schmidt Schultz Scott Sharp Shaw Shelton Sherman Silva Simmons Singh "
    "Slater Snyder Sokolov Spencer Stafford Stanton Steele Stein Stewart Sullivan Summers Sutton Suzuki Swanson "
    "Takeda Tanaka Taylor Thornton Todd Torres Tucker Turner Tyler Ulrich Vance Vargas Vaughn Vogel Wagner Walker "
    "Wallace Walsh Ward Warren Watkins Watson Weaver Webb Weber Webster Welch Wells Wheeler Whitman Wilkins Williams "
    "Wilson Winters Wolf Woods Wright Wyatt Yamada Yates Yilmaz York Young Zimmer",
)  # fmt: skip
"""Last names."""

CITIES = _words(
    "cities",
    "Paris London Rome Berlin Madrid Vienna Prague Dublin Oslo Cairo Lisbon Athens Warsaw Budapest Geneva Zurich "
    "Munich Hamburg Cologne Dresden Milan Naples Venice Turin Florence Seville Valencia Porto Bordeaux Lyon Marseille "
    "Nice Calais Brussels Antwerp Ghent Rotterdam Utrecht Copenhagen Aarhus Stockholm Uppsala Bergen Helsinki Riga "
    "Vilnius Kiev Odessa Moscow Kazan Istanbul Ankara Beirut Damascus Baghdad Tehran Kabul Delhi Mumbai Madras Dhaka "
    "Bangkok Hanoi Manila Jakarta Singapore Shanghai Beijing Canton Tokyo Kyoto Osaka Seoul Busan Sydney Perth "
    "Auckland Honolulu Seattle Portland Denver Chicago Detroit Boston Quebec Toronto Montreal Dallas Houston Austin "
    "Atlanta Miami Havana Mexico Bogota Quito Lima Santiago Rosario Recife Salvador Dakar Accra Lagos Nairobi Kampala "
    "Harare Durban Tunis Algiers Tangier Leeds Bristol Glasgow Cardiff Belfast Norwich Exeter York Dover Bath Chester "
    "Oxford Cambridge",
)  # fmt: skip
"""Cities."""

COLOURS = _words(
    "colours",
    "red blue white black brown orange grey yellow pink silver golden beige violet crimson olive scarlet ivory maroon "
    "navy cream bronze tan indigo rose amber khaki lime coral emerald copper",
)  # fmt: skip
"""Colours."""

ANIMALS = _words(
    "animals",
    "dog cat horse parrot rabbit pony goat canary donkey pigeon snake goose llama owl mouse tiger lion bear wolf fox "
    "deer camel elephant monkey turtle lizard frog spider eagle hawk raven swan duck hen pig cow sheep bull squirrel "
    "badger mole seal whale shark crab lobster salmon trout bee wasp beetle",
)  # fmt: skip
"""Animals."""

JOBS = _words(
    "jobs",
    "baker pilot nurse lawyer farmer dentist plumber teacher singer tailor butcher judge carpenter librarian gardener "
    "chemist sailor miner barber surgeon potter clerk soldier hunter cook waiter poet actor banker doctor priest "
    "porter printer brewer driver weaver cobbler fisherman merchant musician dancer guard",
)  # fmt: skip
"""Occupations."""

FOODS = _words(
    "foods",
    "bread cheese butter soup rice fish beef mutton bacon ham eggs honey jam cake pie porridge beans peas carrots "
    "cabbage apples pears plums cherries grapes lemons melons figs dates nuts almonds tea coffee milk cocoa cider "
    "beer wine",
)  # fmt: skip
"""Things to eat and drink."""

DAYS = _words(
    "days",
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
)  # fmt: skip
"""Days of the week."""

MONTHS = _words(
    "months",
    "January February March April May June July August September October November December",
)  # fmt: skip
"""Months."""

COUNTS = _words(
    "counts",
    "one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty hundred thousand",
)  # fmt: skip
"""Numbers as words."""

LISTS = (
    ADJECTIVES,
    NOUNS,
    FIRST_NAMES,
    LAST_NAMES,
    CITIES,
    COLOURS,
    ANIMALS,
    JOBS,
    FOODS,
    DAYS,
    MONTHS,
    COUNTS,
)
"""All lists."""

_ONSETS, _VOWELS, _CODAS = (
    tuple(part.strip() for part in parts.split(","))
    for parts in (
        "b,br,c,ch,cl,d,dr,f,fl,g,gr,h,j,k,kr,l,m,n,p,pl,qu,r,s,sh,sk,st,t,th,tr,v,w,y,z",
        "a,e,i,o,u,a,e,i,o,ai,au,ea,ee,ie,oa,ou",
        "l,m,n,r,s,t,d,k,th,nd,rt,lm,x,,,,,,",
    )
)
"""The parts of the syllables of invented words."""


def invented(rng: np.random.Generator, syllables: tuple[int, int] = (2, 3)) -> str:
    """Draw an invented word, such as "varnok", with a number of syllables in this range."""
    count = int(rng.integers(syllables[0], syllables[1] + 1))
    parts = []
    for onset, vowel, coda in rng.random((count, 3)).tolist():
        parts += [
            _ONSETS[int(onset * len(_ONSETS))],
            _VOWELS[int(vowel * len(_VOWELS))],
            _CODAS[int(coda * len(_CODAS))],
        ]
    return "".join(parts)

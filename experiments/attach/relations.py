"""Everyday facts in many wordings: relations, pools, passages and small talk for training and testing a memory.

Data is written as compact text blocks ('|' separates wordings) and parsed at import into Relation and Passage tuples.
"""

import re
import sys
from typing import NamedTuple

import numpy as np


class Relation(NamedTuple):
    id: str
    subject: str
    value: str
    statements: tuple
    questions: tuple
    answers: tuple
    reverse: tuple
    updates: tuple


class Passage(NamedTuple):
    text: str
    slots: dict  # slot name -> pool name
    questions: tuple  # ((slot, (q1, q2, q3), (a1, a2)), ...)


# ---------------------------------------------------------------- pools


def _w(text):
    return text.split()


def _p(text):
    return [t.strip() for t in text.replace("\n", " ").split("|") if t.strip()]


def _pick(rng, seq):
    return seq[int(rng.integers(len(seq)))]


FEMALE = _w("""Laura Anna Maria Emily Sophie Grace Hannah Julia Clara Alice Nora Eva Ruth Helen Karen Linda Susan Diana Monica Teresa
Rosa Carmen Elena Irene Lucy Amy Beth Carol Donna Ellen Fiona Gina Holly Ivy Jane Kate Leah Megan Nina Olivia Paula Rachel Sara Tina
Ursula Vera Wendy Yvonne Zoe Amina Fatima Leila Priya Anjali Mei Yuki Sakura Ingrid Astrid Freya Greta Heidi Marta Olga Svetlana Tanya
Chloe Camille Margot Bianca Giulia Lucia Isabel Pilar Ana Joana Ines Aisha Zainab Nadia Samira Esther Miriam Naomi Abigail Joyce Maureen""")
MALE = _w("""John Peter Paul David Mark Thomas James Robert Michael Daniel Simon Andrew Steven Kevin Brian Eric Frank George Henry Ivan
Jack Karl Leo Martin Nick Oscar Patrick Quentin Ralph Sam Tim Victor Walter Adam Ben Carl Dennis Edward Felix Gary Harold Ian Jason Keith
Liam Max Nathan Oliver Philip Roger Scott Tom Vincent William Ahmed Omar Hassan Karim Raj Arjun Vikram Wei Jin Kenji Hiro Lars Sven Erik
Bjorn Dmitri Pavel Marek Tomas Luca Marco Paolo Diego Carlos Miguel Pedro Jorge Tiago Andre Pierre Louis Hugo Kofi Kwame Samuel Joseph Elias""")
FIRST = FEMALE + MALE
LAST = _w("""Smith Brown Jones Miller Davis Wilson Taylor Anderson White Harris Martin Thompson Garcia Martinez Robinson Clark Lewis Lee
Walker Hall Allen Young King Wright Hill Green Adams Baker Nelson Carter Mitchell Perez Roberts Turner Phillips Campbell Parker Evans Edwards
Collins Stewart Morris Rogers Reed Cook Morgan Bell Murphy Bailey Rivera Cooper Cox Howard Ward Torres Peterson Gray Ramirez Watson Brooks
Kelly Sanders Price Bennett Wood Barnes Ross Henderson Coleman Jenkins Perry Powell Long Patterson Hughes Flores Washington Butler Simmons
Foster Gonzales Bryant Alexander Russell Griffin Diaz Hayes Myers Ford Hamilton Graham Sullivan Wallace Woods Cole West Jordan Owens Reynolds
Fisher Ellis Harrison Gibson Marshall Wells Webb Simpson Stevens Tucker Porter Hunter Hicks Crawford Henry Boyd Mason Kennedy Warren Dixon
Burns Gordon Shaw Holmes Rice Robertson Hunt Black Daniels Palmer Mills Nichols Grant Knight Ferguson Stone Hawkins Dunn Perkins Hudson
Spencer Gardner Payne Pierce Berry Arnold Wagner Willis Ray Watkins Olson Carroll Duncan Snyder Hart Cunningham Lane Andrews Novak Kowalski
Schmidt Weber Fischer Keller Rossi Ferrari Silva Santos Costa Kumar Patel Singh Khan Chen Wang Kim Park Tanaka Sato Larsen Hansen Lindgren""")
_KIN_F = _p(
    "my sister|my mother|my aunt|my cousin|my daughter|my wife|my grandmother|my niece|my mother-in-law|my stepsister|my girlfriend|our nanny|my godmother|my sister-in-law"
)
_KIN_M = _p(
    "my brother|my father|my uncle|my cousin|my son|my husband|my grandfather|my nephew|my father-in-law|my stepbrother|my boyfriend|our gardener|my godfather|my brother-in-law"
)
_KIN_N = _p("""my friend|my colleague|my neighbour|my flatmate|my boss|our landlord|our neighbour|my old classmate|my teacher|my coach|our babysitter|
my accountant|my tutor|my best friend|my business partner|our cleaner|my running partner|my hairdresser|our intern|my mentor|my pen pal|my lawyer|our receptionist""")
_KIN_BARE = _p("""my sister|my brother|my mother|my father|my aunt|my uncle|my grandmother|my grandfather|our landlord|my boss|my wife|my husband|my son|my daughter|
my flatmate|our neighbour upstairs|the man next door|our postman|my oldest friend|my ex-boss|my little brother|my older sister|my dad|my mum|my grandma|my grandpa|
our family doctor|my driving instructor|my piano teacher|the new girl at work|our building manager|my twin brother|my twin sister|our team leader|my math tutor""")


def _person(rng):
    return _pick(rng, FIRST) if rng.random() < 0.3 else f"{_pick(rng, FIRST)} {_pick(rng, LAST)}"


def _full_name(rng):
    return f"{_pick(rng, FIRST)} {_pick(rng, LAST)}"


def _my_person(rng):
    u = rng.random()
    if u < 0.25:
        return f"{_pick(rng, _KIN_F)} {_pick(rng, FEMALE)}"
    if u < 0.5:
        return f"{_pick(rng, _KIN_M)} {_pick(rng, MALE)}"
    if u < 0.75:
        return f"{_pick(rng, _KIN_N)} {_pick(rng, FIRST)}"
    return _pick(rng, _KIN_BARE)


CITY = _p("""Toronto|Berlin|Paris|London|Madrid|Rome|Lisbon|Vienna|Prague|Dublin|Oslo|Stockholm|Helsinki|Copenhagen|Warsaw|Budapest|Athens|Brussels|
Amsterdam|Zurich|Geneva|Munich|Hamburg|Cologne|Frankfurt|Barcelona|Valencia|Seville|Porto|Milan|Naples|Turin|Venice|Florence|Lyon|Nice|Bordeaux|Marseille|
Glasgow|Edinburgh|Manchester|Liverpool|Leeds|Bristol|Cardiff|Belfast|Cork|Chicago|Boston|Seattle|Denver|Austin|Dallas|Houston|Miami|Atlanta|Portland|Phoenix|
Detroit|Cleveland|Nashville|Memphis|Orlando|San Diego|New York|Los Angeles|San Francisco|Las Vegas|New Orleans|Salt Lake City|Vancouver|Montreal|Ottawa|Calgary|
Quebec City|Halifax|Mexico City|Havana|Lima|Bogota|Santiago|Buenos Aires|Rio de Janeiro|Sao Paulo|Montevideo|Quito|Cairo|Nairobi|Lagos|Accra|Cape Town|
Johannesburg|Casablanca|Tunis|Istanbul|Ankara|Dubai|Beirut|Tel Aviv|Mumbai|Delhi|Bangalore|Kolkata|Karachi|Dhaka|Bangkok|Hanoi|Singapore|Kuala Lumpur|Jakarta|
Manila|Hong Kong|Shanghai|Beijing|Taipei|Seoul|Busan|Tokyo|Osaka|Kyoto|Sydney|Melbourne|Perth|Brisbane|Adelaide|Auckland|Wellington|Reykjavik|Tallinn|Riga|Vilnius|Kyiv""")
TOWN = _p("""Ashbourne Hill|Westmere|Oakford|Milbrook|Harnley|Pinecroft|Redfield|Stonebury|Larkham|Brindle Bay|Copperton|Elmstead|Farrowby|Glenmoor|Hazelby|
Kestrel Point|Lindenau|Marlow Creek|Northaven|Ottersley|Penwick|Quarry Bank|Rosendale|Silverton Lake|Thornby|Underhill|Valebridge|Wexcombe|Yarrowfield|Amberley Cross|
Birchdale|Cloverton|Dunwell|Eastbrook|Fernley|Graywater|Hollowell|Ivybridge Mill|Juniper Flats|Kingsmead|Lowmarsh|Maple Junction|Newcastle Ridge|Orchard Vale|
Plumridge|Ravensby|Saltmarsh|Tillerby|Upper Wenlow|Vernham|Willow Bend|Crestfall|Dorrance|Foxhollow|Greenhithe Park|Hartswell|Longmere|Mossgate|Nettleby|Sandwick|
Trenmoor|Weatherby Falls|Bramford Bay|Coldspring""")
JOB = _p("""nurse|teacher|plumber|electrician|baker|dentist|lawyer|carpenter|pilot|chef|waiter|barber|farmer|journalist|librarian|accountant|architect|mechanic|
painter|photographer|pharmacist|firefighter|postman|cashier|translator|tailor|gardener|banker|engineer|programmer|butcher|florist|singer|dancer|actor|writer|editor|
judge|surgeon|vet|taxi driver|bus driver|truck driver|train driver|security guard|police officer|soldier|sailor|fisherman|beekeeper|jeweller|watchmaker|optician|
hairdresser|bartender|receptionist|secretary|consultant|economist|biologist|chemist|physicist|geologist|historian|psychologist|social worker|midwife|paramedic|
personal trainer|tour guide|flight attendant|estate agent|insurance agent|web designer|data analyst|graphic designer|sound engineer|museum curator|welder|roofer|
bricklayer|locksmith|piano tuner|interpreter|animator|caretaker|office manager|referee|zookeeper|primary school teacher|swimming instructor""")
FOOD = _p("""lasagna|pizza|sushi|fried rice|pancakes|spaghetti|tacos|curry|chili|ramen|risotto|paella|goulash|pierogi|falafel|hummus|kebab|couscous|dumplings|
spring rolls|roast chicken|fish and chips|meatballs|mashed potatoes|grilled salmon|steak|lamb stew|beef stew|tomato soup|onion soup|pumpkin soup|chicken soup|
lentil soup|potato salad|Greek salad|caesar salad|mushroom risotto|apple pie|cheesecake|chocolate cake|carrot cake|banana bread|waffles|omelette|scrambled eggs|
porridge|muesli|yoghurt|toast|croissants|bagels|burritos|nachos|quesadillas|enchiladas|pad thai|pho|bibimbap|kimchi|tempura|tofu|samosas|butter chicken|naan|
biryani|moussaka|gnocchi|ravioli|pesto pasta|carbonara|macaroni and cheese|hamburgers|hot dogs|barbecue ribs|pulled pork|fried chicken|shrimp|oysters|mussels|
crab cakes|stuffed peppers|ratatouille|quiche|shepherd's pie|ice cream|tiramisu|rice pudding|peanut butter sandwiches""")
OBJECT = _p("""umbrella|suitcase|backpack|drill|ladder|tent|camera|bicycle|guitar|lamp|blanket|hammer|saw|wheelbarrow|toolbox|kettle|toaster|blender|frying pan|
bread knife|cutting board|corkscrew|tea pot|vase|mirror|clock|radio|projector|printer|keyboard|tablet|phone charger|flashlight|sleeping bag|cool box|picnic basket|
raincoat|winter coat|scarf|hat|belt|wallet|handbag|watch|necklace|ring|pair of boots|pair of skis|sledge|surfboard|tennis racket|football|chess set|puzzle|dictionary|
cookbook|atlas|notebook|calculator|stapler|pair of scissors|sewing machine|iron|ironing board|vacuum cleaner|broom|bucket|mop|garden hose|rake|shovel|lawn mower|
watering can|bird cage|fish tank|dog leash|stroller|car seat|high chair|bookshelf|desk|stool|armchair|folding chair|coffee table|rug|pillow|mattress|heater|fan|
telescope|microscope|pair of binoculars|compass|map|whistle|rope|padlock|extension cord|battery charger|microphone|speaker|pair of headphones|violin|easel|kite|drone|skateboard|helmet""")
_THING = _p("""suitcase|backpack|drill|ladder|tent|camera|spare umbrella|guitar|toolbox|sewing machine|sleeping bag|picnic basket|winter coat|photo album|telescope|
chess set|passport folder|first aid kit|spare key|fish tank|garden hose|vacuum cleaner|projector|extension cord|bread machine|ironing board|tennis racket|air mattress|
jewellery box|tax folder|old radio|wedding dress|coffee grinder|camping stove|bicycle pump|label printer|step ladder|waffle iron|fishing rod|piggy bank""")
_FURN = _p("""desk|bookshelf|coffee table|dining table|armchair|bed frame|kitchen counter|garden bench|wardrobe|front door|bathroom shelf|old chest|night stand|
fence|shoe rack|mirror frame|vase in the hall|salad bowl|jewellery box|lamp stand|cutting board|picture frame|bench in the yard|staircase""")
_DEVICE = _p("""washing machine|dishwasher|printer|laptop|fridge|vacuum cleaner|coffee machine|television|microwave|heater|router|camera|electric scooter|lawn mower|
freezer|tumble dryer|air conditioner|sewing machine|hair dryer|toaster|projector|electric drill|record player|scanner|boiler|dehumidifier""")


def _the(items, words=("the", "my", "our")):
    return lambda rng: f"{_pick(rng, words)} {_pick(rng, items)}"


_PETNAMES = _p("""Milo|Luna|Rocky|Bella|Coco|Biscuit|Pepper|Shadow|Ginger|Daisy|Rusty|Socks|Pumpkin|Buddy|Snowy|Tiger|Mocha|Peanut|Whiskers|Oreo|Ziggy|Patch|
Noodle|Pickle|Smokey|Duke|Honey|Toffee|Muffin|Gizmo|Nacho|Domino|Waffles|Cleo|Bruno|Pixie|Jasper|Olive|Scout|Bandit|Hazel|Maple|Truffle|Dexter""")
_PETKIND = _p("cat|dog|rabbit|hamster|parrot|tortoise|guinea pig|pony|ferret|canary|goat|puppy|kitten")


def _pet(rng):
    u = rng.random()
    if u < 0.6:
        return f"{_pick(rng, ('my', 'our'))} {_pick(rng, _PETKIND)} {_pick(rng, _PETNAMES)}"
    if u < 0.8:
        return _pick(rng, _PETNAMES)
    return f"{_pick(rng, FIRST)}'s {_pick(rng, _PETKIND)}"


_BR_A = _w(
    "Bright Silver North Blue Green Oak Stone River Sun Cloud Iron Clear Swift True Golden Red Alder Maple Delta Nova Vert Luma Kor Pax Zen Orbi Quanta Hexa Moro Tri"
)
_BR_B = _w(
    "lane works tech field soft ware point line star wave bridge gate mark leaf craft motion logic port stack dyne vista mont tel con rium"
)
BRAND = [a + b for a in _BR_A for b in _BR_B if a + b not in TOWN]
_PROJ = _w(
    "Falcon Orion Cedar Atlas Beacon Comet Delta Echo Granite Horizon Indigo Jupiter Kite Lotus Mercury Nimbus Onyx Phoenix Quartz Raven Saturn Tulip Umbra Vega Willow Zephyr"
)
_PROJ2 = _p("""the website redesign|the warehouse move|the school garden|the kitchen renovation|the annual report|the customer survey|the mobile app|the new bridge|
the recycling campaign|the staff handbook|the museum exhibition|the solar roof|the data migration|the charity auction|the office relocation|the film festival|
the language course|the bike lane study|the product catalogue|the alumni newsletter""")
PLACE = _p("""the library|the community centre|the storage room|the back gate|the gym|the office|the garage|the bike shed|the swimming pool|the town hall|the music school|
the clinic|the warehouse|the summer house|the boat house|the print shop|the youth club|the laundry room|the guest apartment|the archive|the church hall|the workshop|
the tennis club|the holiday cottage|the main building|the lab|the nursery|the hostel|the bakery on the corner|the old mill""")
SHOP = _p("""the bakery|the pharmacy|the post office|the bookshop|the hardware store|the flower shop|the butcher|the fish market|the corner shop|the pet shop|
the shoe repair shop|the bike shop|the cheese shop|the garden centre|the toy store|the tea house|the barber shop|the recycling centre|the optician|the bank branch|
the second-hand shop|the wine shop|the museum cafe|the ice rink|the climbing hall|the public pool|the farm shop|the dry cleaner|the stationery shop|the ticket office""")
ROOM = _p("""the kitchen|the living room|the guest room|the bathroom|the hallway|the attic|the nursery|the study|the dining room|the basement|my bedroom|our bedroom|
the small meeting room|the big meeting room|the conference room|the lecture hall|the classroom upstairs|the reading room|the waiting room|the music room|the staff room|
the gallery|the lobby|the training room|the lounge|my office|our sun room|the games room|the laundry room|the library annex""")
EVENT = _p("""the team dinner|the summer party|the school play|the book club evening|the wedding|the board meeting|the charity run|the farewell party|the chess tournament|
the spring concert|the flea market|the yoga workshop|the parents' evening|the film night|the family reunion|the trade fair|the cooking class|the office picnic|
the science fair|the garden party|the budget meeting|the house-warming party|the open day|the quiz night|the wine tasting|the photo exhibition|the neighbourhood party|
the safety training|the job interview|the graduation ceremony|the bake sale|the poetry reading""")
DISH = _p("""my apple cake|grandma's stew|the lentil soup|our pizza dough|the lemon tart|the fish pie|my banana bread|the potato gratin|the Sunday roast|the nut loaf|
the cheese souffle|my tomato sauce|the carrot cake|the garlic bread|the oat cookies|the plum crumble|the chicken casserole|the vegetable lasagna|the cinnamon rolls|
mum's meatloaf|the onion tart|the chocolate brownies|the rye bread|our Christmas cake|the rice pudding""")
PLANT = _p("""tomatoes|roses|tulips|basil|mint|lavender|sunflowers|strawberries|potatoes|carrots|beans|peas|pumpkins|lettuce|onions|garlic|spinach|cucumbers|peppers|
zucchini|radishes|raspberries|blueberries|daisies|lilies|orchids|cactuses|ferns|rosemary|thyme|parsley|sage|cabbage|leeks|corn|grapes|figs|melons|chives|beets""")
HOUSEPLANT = _p("""the orchid|the fern|the cactus|the rubber plant|my basil pot|the palm in the hall|the ivy|the lemon tree|my bonsai|the peace lily|the aloe plant|
our olive tree|the fig in the office|the spider plant|the tomato seedlings|my chili plant|the hydrangea|the geranium|the bamboo|the snake plant""")
HOBBY = _p("""chess|knitting|painting|photography|gardening|hiking|fishing|baking|cooking|pottery|bird watching|cycling|climbing|sailing|surfing|yoga|dancing|singing|
camping|kayaking|archery|calligraphy|crochet|sewing|woodworking|origami|astronomy|magic tricks|juggling|board games|video games|crossword puzzles|jigsaw puzzles|
model trains|stamp collecting|scuba diving|horse riding|beekeeping|creative writing|genealogy|karaoke|metal detecting|soap making|wine making|salsa dancing|stand-up comedy""")
LANGUAGE = _p("""Spanish|French|German|Italian|Portuguese|Dutch|Swedish|Danish|Norwegian|Finnish|Polish|Czech|Hungarian|Romanian|Greek|Turkish|Arabic|Hebrew|Persian|
Hindi|Urdu|Bengali|Tamil|Thai|Vietnamese|Korean|Japanese|Mandarin|Cantonese|Swahili|Russian|Ukrainian|Croatian|Irish|Welsh|Catalan|Basque|Icelandic|Malay|Latin""")
SPORT = _p("""tennis|football|basketball|volleyball|hockey|badminton|rugby|cricket|golf|handball|baseball|water polo|table tennis|squash|softball|ice hockey|lacrosse|
netball|bowling|darts|snooker|curling|ultimate frisbee|beach volleyball|floorball|padel""")
DRINK = _p("""green tea|black coffee|orange juice|hot chocolate|lemonade|apple juice|espresso|cappuccino|iced tea|red wine|white wine|beer|cider|mineral water|milk|
peppermint tea|tomato juice|ginger ale|coconut water|chai|oat milk latte|cola|chamomile tea|gin and tonic|sparkling water|mango lassi|kombucha|grape juice|decaf coffee|
whisky|carrot juice|earl grey|soy milk|matcha|buttermilk|root beer""")
COLOUR = _p("""red|blue|green|yellow|purple|orange|pink|brown|black|white|grey|turquoise|beige|navy blue|dark green|light blue|gold|silver|violet|maroon|teal|lilac|
cream|mustard yellow|olive green|burgundy|sky blue|mint green|coral|bright red|lavender|charcoal grey""")
DAY = _w("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTH = _w("January February March April May June July August September October November December")
SUBJECT = _p("""biology|chemistry|physics|history|geography|economics|philosophy|law|medicine|architecture|music|psychology|sociology|linguistics|computer science|
mathematics|statistics|engineering|nursing|journalism|art history|political science|theology|archaeology|marketing|astronomy|geology|accounting|education|drama|
veterinary medicine|film studies|anthropology|graphic design|civil engineering""")
INSTRUMENT = _p("""piano|violin|guitar|cello|flute|clarinet|trumpet|saxophone|drums|harp|accordion|trombone|banjo|ukulele|mandolin|organ|oboe|bassoon|viola|
double bass|harmonica|bass guitar|recorder|bagpipes|French horn|tuba|xylophone|sitar""")
MATERIAL = _p("""oak|pine|steel|glass|marble|plastic|bamboo|leather|walnut|brass|copper|concrete|cork|aluminium|granite|cherry wood|iron|slate|clay|birch|ceramic|
maple wood|stainless steel|stone|recycled wood|wicker|teak|bronze""")
FLOORING = _p(
    "oak|tiles|carpet|linoleum|cork|marble|laminate|concrete|bamboo|slate|vinyl|pine boards|stone|terracotta tiles|parquet|rubber mats|granite|wool carpet"
)
TOPIC = _p("""whales|volcanoes|the Roman Empire|black holes|sleep|mushrooms|the stock market|Napoleon|octopuses|the history of bread|climate change|bees|the human brain|
the Silk Road|ancient Egypt|the moon landing|trees|negotiation|the Vikings|coffee|glaciers|codes and spies|Japanese gardens|the French Revolution|sharks|parenting|
artificial intelligence|the Wild West|dinosaurs|mountaineering|the deep sea|jazz|meditation|railways|Antarctica|chess openings|viruses|the Cold War|birds of prey|cheese making""")
VEHICLE = _p("""red van|white pickup|blue hatchback|black jeep|silver sedan|green minivan|yellow scooter|motorbike|old camper van|electric car|sports car|delivery van|
station wagon|small truck|moped|grey estate car|orange convertible|tractor|hybrid|three-wheeler|white limousine|brown jeep|food truck|minibus""")
ANIMAL = _p(
    "cat|dog|rabbit|hamster|parrot|tortoise|guinea pig|pony|ferret|canary|goat|snake|gecko|duck|goose|hen|donkey|mouse|iguana|budgie|goldfish|hedgehog|sheep|llama|chinchilla"
)
WILD = _p(
    "wolf|eagle|dragon|dolphin|owl|tiger|fox|whale|butterfly|turtle|lion|raven|octopus|bear|snake|swan|spider|shark|deer|elephant|horse|frog|crocodile|penguin|zebra"
)
BREED = _p("""poodle|beagle|labrador|terrier|collie|dachshund|bulldog|husky|boxer|spaniel|greyhound|pug|rottweiler|dalmatian|golden retriever|German shepherd|chihuahua|
whippet|corgi|setter|mastiff|Great Dane|schnauzer|Irish wolfhound|pointer|maltese""")
FEAR = _p("""spiders|heights|thunder|dogs|snakes|flying|the dark|clowns|needles|deep water|mice|lifts|crowds|wasps|bats|dentists|horses|blood|tunnels|moths|geese|fire|
public speaking|lightning|bridges|ghosts|escalators|frogs""")
COUNTRY = _p("""Italy|Spain|France|Greece|Portugal|Norway|Iceland|Ireland|Scotland|Croatia|Turkey|Egypt|Morocco|Kenya|Tanzania|India|Nepal|Thailand|Vietnam|Japan|
South Korea|China|Australia|New Zealand|Canada|Mexico|Cuba|Peru|Chile|Brazil|Argentina|Sweden|Finland|Poland|Austria|Switzerland|Malta|Cyprus|Sri Lanka|Indonesia|Jordan|Costa Rica""")
GENRE = _p(
    "jazz|blues|rock|country|folk|opera|hip hop|reggae|techno|classical|heavy metal|soul|funk|punk|disco|gospel|salsa|flamenco|ska|R&B|swing|indie pop|choral music|bluegrass|electro"
)
COLLECT = _p("""stamps|old coins|postcards|vinyl records|comic books|teapots|seashells|matchboxes|fossils|beer mats|snow globes|fridge magnets|model cars|antique maps|
dolls|bottle caps|fountain pens|keyrings|film posters|thimbles|marbles|badges|clocks|buttons|cookbooks|owls made of glass|concert tickets|baseball cards|tin soldiers|candlesticks""")
SPOT = _p("""under the stairs|in the attic|in the top drawer|behind the sofa|in the garage|on the balcony|under the bed|in the hall closet|on the bottom shelf|
in the basement|in the kitchen cupboard|on top of the fridge|in the garden shed|next to the washing machine|behind the door|in the blue box|in the car boot|on the window sill|
in the laundry room|in the left cabinet|under the sink|in my wardrobe|on the third shelf|in the storage room|beside the fireplace|in the wooden chest|on the piano|
in the bathroom cabinet|at the office|in the spare room|behind the curtain|in the green bag|under the workbench|in the bike shed""")
PETSPOT = _p("""under the stairs|on the sofa|in a shoe box|next to the stove|on the armchair|under the kitchen table|in the hallway|on my bed|in the laundry basket|
on the window sill|by the back door|in the bathtub|behind the sofa|in the garden shed|on an old coat|in the barn|on the rug|beside the radiator|under the desk|on the balcony""")
PETFOOD = _p(
    "tuna|carrots|chicken|lettuce|cheese|sunflower seeds|salmon|liver|apples|boiled eggs|dry biscuits|peas|rice|sardines|turkey|oats|dandelions|beef|mealworms|pumpkin|cucumber|bananas|ham|hay"
)
PETTOY = _p(
    "tennis ball|rubber duck|old sock|toy mouse|piece of rope|squeaky bone|feather stick|cardboard box|stuffed rabbit|plastic bottle|ping-pong ball|slipper|bell|frisbee|ball of wool|paper bag|wooden stick|rubber ring"
)
PRODUCT = _p("""bicycles|shoes|solar panels|toys|cheese|furniture|paper|windows|lamps|tractors|mattresses|headphones|raincoats|pianos|batteries|medical software|ice cream|
kitchen knives|wind turbines|carpets|elevators|chocolate|paint|tents|spectacles|garden tools|candles|coffee machines|drones|socks|bathtubs|ropes|backpacks|tea|car tyres|hearing aids""")
VENUE = _p("""the town hall|the old brewery|the city park|the boathouse|the church hall|the rooftop terrace|the school gym|the harbour restaurant|the botanical garden|
the library|the community centre|the fire station|the castle|the concert hall|the sports club|the museum|the hotel lobby|the theatre|the university canteen|the beach bar|
the vineyard|the market square|the cinema|the railway museum|the art school|the barn""")
INGREDIENT = _p("""cinnamon|nutmeg|ginger|cardamom|lemon zest|vanilla|sea salt|honey|rum|coconut milk|mustard|soy sauce|smoked paprika|orange peel|thyme|dark beer|
white pepper|sour cream|apple juice|garlic|maple syrup|cloves|anise|buttermilk|almonds|coffee|saffron|chili flakes|brown butter|fish sauce|cumin|rosemary""")
TOPPING = _p(
    "mushrooms|pineapple|olives|anchovies|ham|salami|artichokes|capers|spinach|corn|tuna|goat cheese|onions|peppers|rocket|bacon|basil|jalapenos|aubergine|blue cheese|broccoli|shrimp"
)
CROP = _p(
    "wheat|barley|maize|potatoes|sugar beet|rapeseed|rice|oats|rye|soybeans|hops|flax|sunflowers|cotton|lentils|tobacco|onions|cabbage|apples|cherries|asparagus|grapes|peanuts|lavender"
)
PART = _p(
    "hinge|handle|motor|zip|power cable|on switch|lid|wheel|filter|fuse|screen|battery|pump|belt|spring|drum|display|fan|lock|thermostat|hose|plug|lens|blade|door seal|left button"
)
ILLNESS = _p(
    "nut|milk|peanuts|shellfish|eggs|wheat|soy|strawberries|bee stings|cat hair|pollen|dust|penicillin|latex|kiwi|sesame|celery|mustard|tomatoes|horses|grass|lupin|almonds|nickel|fish|aspirin"
)
ALLERGEN = ILLNESS[1:]
MEDICINE = _p(
    "ibuprofen|aspirin|paracetamol|insulin|penicillin|antihistamines|iron tablets|vitamin D|cough syrup|eye drops|beta blockers|metformin|omeprazole|amoxicillin|statins|magnesium|codeine|cortisone|blood thinners|nasal spray|zinc|antacids|steroids|folic acid"
)
BONE = _p(
    "wrist|ankle|collarbone|left arm|right arm|nose|big toe|thumb|elbow|hip|kneecap|heel|left leg|right leg|shin|little finger|jaw|shoulder|two ribs|foot"
)
COSTUME = _p(
    "pirate|witch|vampire|robot|clown|knight|mermaid|cowboy|astronaut|zombie|wizard|ghost|dinosaur|nun|viking|pumpkin|skeleton|bee|lobster|detective|mummy|unicorn|chef|superhero"
)
ZODIAC = _w("Aries Taurus Gemini Cancer Leo Virgo Libra Scorpio Sagittarius Capricorn Aquarius Pisces")
BLOOD = _p("A positive|A negative|B positive|B negative|O positive|O negative|AB positive|AB negative")
PRIZE = _p(
    "a toaster|a trip to Rome|a gold medal|a goat|a gift basket|a sports car|a silver cup|a year of free coffee|a mountain bike|five hundred dollars|a weekend at a spa|a television|a cooking course|a signed football|a balloon ride|a box of wine|a hammock|a piano|two cinema tickets|a scholarship"
)
FAULT = _p(
    "a leaking pipe|mould on the wall|a broken window|no heating|a loose socket|a blocked drain|a cracked tile|a wasp nest|a flickering light|a jammed door|ants|a dripping tap|peeling paint|a smell of gas|a hole in the ceiling|a squeaky floorboard|mice|a broken blind|no hot water|a stuck drawer"
)
SIZE = _p(
    "small|medium|large|extra large|extra small|XXL|size 36|size 38|size 40|size 42|size 44|size 46|size 10|size 12|size 14|kids' 140"
)
NICK = _p(
    "Sparky|Boots|Chief|Doc|Slim|Red|Ace|Bear|Tiny|Lefty|Curly|Professor|Captain|Sunny|Bee|Moose|Rocket|Fuzzy|Smiley|Turbo|Dizzy|Pepper|Whiz|Goose|Mouse|Ziggy|Beans|Kiki|Jojo|Bam"
)
RIVER = _p(
    "the Arrow|the Marl|the Tessen|the Blackwater|the Orne|the Little Wye|the Silverbrook|the Harn|the Dunmere|the Kell|the Ruska|the Amber|the Vant|the Stony Brook|the Lorn|the Elda|the Mossy Fork|the Pell"
)
SKILL = _p(
    "drive|swim|juggle|weld|knit|ski|type without looking|bake bread|ride a horse|play poker|fly a drone|cook|sew|sail|code|dance|skate|row|draw|surf|read music|use sign language|make sushi|cut hair|fix bikes|whistle"
)
COURSE = _p(
    "the pottery course|the Spanish class|the evening yoga class|the first aid course|the drawing class|the chemistry lecture|the swimming lessons group|the driving theory course|the creative writing seminar|the statistics course|the choir|the judo class|the ballet class|the Python course|the bread baking workshop|the sailing course|the sewing circle|the guitar class"
)
CLUB = _p(
    "the chess club|the rowing club|the tennis club|the book club|the hiking group|the choir|the film club|the photo club|the gardening club|the cycling club|the debating society|the running group|the sailing club|the bridge club|the amateur theatre group|the astronomy club|the judo club|the board game group"
)
BANK = _p(
    "Harbour Savings Bank|Northfield Bank|the credit union|First Meadow Bank|Alpine Bank|the post bank|Lakeside Trust|Union Farmers Bank|Sterling & Moss|the cooperative bank|Redstone Bank|City Mutual"
)
FLIGHT = _p(
    "my flight to Rome|our flight to Oslo|the morning flight to Paris|the flight to Madrid|the Lisbon flight|my flight home|the evening flight to Vienna|our connecting flight|the flight to Tokyo|the Dublin flight|the flight to Athens|my flight to Boston|the charter flight|the last flight to Berlin"
)
FARM = _p(
    "the Miller farm|my uncle's farm|the farm by the river|the Olson place|our field behind the barn|the upper field|the farm in the valley|the Kowalski farm|my grandparents' farm|the big field by the road|the neighbour's land|the monastery farm"
)
SHIP = _p(
    "the Northern Star|the Santa Clara|the Blue Heron|the Queen Edith|the Marigold|the Baltic Trader|the Albatross|the Iron Duchess|the Ocean Pearl|the Gull|the Evening Tide|the Cormorant|the old barge|the ferry Helga"
)
CARGO = _p(
    "timber|coal|bananas|grain|cars|coffee beans|steel pipes|cement|oranges|cotton|fertilizer|sugar|machine parts|cattle|salt|gravel|tea|rice|olive oil|furniture|wool|scrap metal"
)
PARCEL = _p(
    "the parcel from grandma|the big box in the hall|the package from the office|the parcel at the post office|the box on the porch|the crate in the cellar|the envelope from the lawyer|the brown parcel|the package for Anna|the delivery from this morning|the box with the red tape|the parcel from Japan"
)
CAR = _p(
    "my car|our van|the rental car|my wife's car|the company car|dad's truck|the white Toyota|the old Volvo|our camper|the blue Ford|my husband's car|the delivery van|my sister's car|the minibus"
)
BILL = _p(
    "the electricity bill|the water bill|the phone bill|the rent|the gas bill|the internet subscription|the car insurance|the gym subscription|the newspaper subscription|the music subscription|the school fees|the garage rent"
)
MAJORSIB = _p("one|two|three|four|five|six|seven|eight|nine")
ROUTE = _p(
    "the last bus to town|the first train to the airport|the ferry to the island|the school bus|the night train|the shuttle to the station|the express to the coast|the tram to the zoo|the bus to the hospital|the morning boat|the 40 bus|the train to grandma's village"
)
DECOR = _p(
    "a lighthouse|a bowl of fruit|a sailing boat|an old castle|a snowy mountain|a field of poppies|a sleeping cat|a railway bridge|two horses|a winter forest|a fishing village|a dancing couple|a waterfall|a market square|a red barn|a vase of tulips"
)
ADJ = _w("""purple silent golden rusty frozen hollow gentle crooked velvet stormy lazy brave copper dusty hidden lucky mellow narrow orange polite quiet rapid salty
tender urban vivid wooden yellow amber bitter calm dizzy eager fancy giant happy icy jolly keen lively misty noble odd plain round sharp tall tiny warm young ancient broad
clever distant empty fresh green heavy humble ivory jade little modern neat open proud royal simple soft steady sunny swift thick wild winter zesty blue bold bright cosmic
crimson early fluffy foggy grand hungry indigo loud magic marble northern pale patient pink plastic red rough scarlet secret shiny silver sleepy smooth southern spare spicy stone sweet twin""")
NOUN = _w("""walrus lantern river button castle pepper window rocket harbor carpet anchor basket candle dragon engine falcon garden hammer island jacket kettle ladder
magnet needle orchard pencil quilt rabbit saddle tunnel valley wagon yogurt zebra acorn bridge cactus desert eagle forest guitar helmet igloo jungle kitten lemon mirror
noodle ocean parrot rainbow sailor thunder umbrella violin whistle apple barrel camel dolphin elbow feather goblin hazel ink jewel koala lobster meadow nutmeg otter
penguin puzzle raven shovel teapot turtle vulture willow badger biscuit canyon comet crayon diamond fiddle glacier hermit lagoon mango marble mitten monkey mountain oyster
pancake pebble planet pumpkin saturn scarf spoon tiger tractor trumpet tulip waffle""")
_ST_A = _w(
    "Maple Oak Station Church Mill Park Garden River Castle Market Rose Linden Willow King Queen Bridge School Harbour Chapel Elm Orchard Forest Hill Lake Meadow Spring Tower Victoria Cedar Birch Pine Foundry Weaver Baker Dock"
)
_ST_B = _w("Street Road Lane Avenue Square Drive Way")


def _street(rng):
    return f"{_pick(rng, _ST_A)} {_pick(rng, _ST_B)}"


def _address(rng):
    return f"{int(rng.integers(1, 200))} {_street(rng)}"


def _digits(k):
    return lambda rng: str(int(rng.integers(10 ** (k - 1) if k > 1 else 2, 10**k)))


def _time(rng):
    return f"{int(rng.integers(1, 13))}:{_pick(rng, ('00', '15', '30', '45', '10', '20', '40', '50'))} {_pick(rng, ('am', 'pm'))}"


def _hours(lo, hi, half):
    return lambda rng: f"{int(rng.integers(lo, hi))}{_pick(rng, ('', ':15', ':30', ':45'))} {half}"


def _date(rng):
    return f"{_pick(rng, MONTH)} {int(rng.integers(1, 29))}"


def _price(rng):
    return (
        f"${int(rng.integers(3, 400))}"
        if rng.random() < 0.7
        else f"${int(rng.integers(2, 60))}.{_pick(rng, ('50', '99', '20', '75'))}"
    )


def _unit(lo, hi, unit, step=1):
    return lambda rng: f"{int(rng.integers(lo, hi)) * step} {unit}"


def _subject_shop_or_place(rng):
    return _pick(rng, PLACE)


POOLS = {
    "me": [""],
    "person": _person,
    "my_person": _my_person,
    "full_name": _full_name,
    "first": FIRST,
    "fname": FEMALE,
    "mname": MALE,
    "last": LAST,
    "place": PLACE,
    "shop": SHOP,
    "room": ROOM,
    "event": EVENT,
    "dish": DISH,
    "houseplant": HOUSEPLANT,
    "course": COURSE,
    "club": CLUB,
    "route": ROUTE,
    "thing": _the(_THING),
    "furniture": _the(_FURN),
    "device": _the(_DEVICE),
    "pet": _pet,
    "company": BRAND,
    "brand": BRAND,
    "project": lambda rng: f"Project {_pick(rng, _PROJ)}" if rng.random() < 0.5 else _pick(rng, _PROJ2),
    "flight": FLIGHT,
    "farm": FARM,
    "ship": SHIP,
    "parcel": PARCEL,
    "car": CAR,
    "bill": BILL,
    "city": CITY,
    "town": TOWN,
    "job": JOB,
    "food": FOOD,
    "object": OBJECT,
    "animal": ANIMAL,
    "wild_animal": WILD,
    "petname": _PETNAMES,
    "breed": BREED,
    "colour": COLOUR,
    "day": DAY,
    "month": MONTH,
    "date": _date,
    "time": _time,
    "morning": _hours(5, 11, "am"),
    "evening": _hours(5, 11, "pm"),
    "year": lambda rng: str(int(rng.integers(1950, 2025))),
    "old_year": lambda rng: str(int(rng.integers(1720, 2000))),
    "future_year": lambda rng: str(int(rng.integers(2026, 2045))),
    **{f"number{k}": _digits(k) for k in range(1, 9)},
    "price": _price,
    "bigprice": lambda rng: f"${int(rng.integers(2, 99))},{_pick(rng, ('000', '500'))}",
    "people": lambda rng: str(int(rng.integers(6, 300))),
    "population": lambda rng: f"{int(rng.integers(2, 99))},{int(rng.integers(1, 10))}00",
    "age": lambda rng: str(int(rng.integers(18, 95))),
    "petage": lambda rng: str(int(rng.integers(2, 19))),
    "small": MAJORSIB,
    "passphrase": lambda rng: f"{_pick(rng, ADJ)} {_pick(rng, NOUN)}",
    "word": NOUN,
    "street": _street,
    "address": _address,
    "hobby": HOBBY,
    "language": LANGUAGE,
    "sport": SPORT,
    "drink": DRINK,
    "topic": TOPIC,
    "plant": PLANT,
    "medicine": MEDICINE,
    "spot": SPOT,
    "petspot": PETSPOT,
    "petfood": PETFOOD,
    "pettoy": PETTOY,
    "vehicle": VEHICLE,
    "subject": SUBJECT,
    "instrument": INSTRUMENT,
    "material": MATERIAL,
    "flooring": FLOORING,
    "size": SIZE,
    "shoe_size": lambda rng: str(int(rng.integers(35, 48))),
    "fear": FEAR,
    "country": COUNTRY,
    "genre": GENRE,
    "collectable": COLLECT,
    "product": PRODUCT,
    "venue": VENUE,
    "ingredient": INGREDIENT,
    "topping": TOPPING,
    "crop": CROP,
    "part": PART,
    "allergen": ALLERGEN,
    "bone": BONE,
    "costume": COSTUME,
    "zodiac": ZODIAC,
    "blood": BLOOD,
    "prize": PRIZE,
    "fault": FAULT,
    "nickname": NICK,
    "river": RIVER,
    "skill": SKILL,
    "bank": BANK,
    "cargo": CARGO,
    "picture": DECOR,
    "height": lambda rng: f"{int(rng.integers(150, 205))} cm",
    "weight": _unit(2, 30, "kilos"),
    "minutes": _unit(3, 19, "minutes", 5),
    "degrees": _unit(14, 25, "degrees", 10),
    "distance": _unit(2, 60, "kilometres"),
    "hall": _p(
        "the small meeting room|the big meeting room|the conference room|the lecture hall|the classroom upstairs|the reading room|the waiting room|the music room|the gallery|the lobby|the training room|the canteen|the gym hall|the chapel|the cinema room|the ballroom"
    ),
    "portable": _p(
        "umbrella|wallet|watch|scarf|hat|ring|necklace|handbag|camera|notebook|tablet|phone|backpack|raincoat|belt|calculator|flashlight|key ring|glove|bracelet|train ticket|passport|lunch box|water bottle|violin case|earring|laptop|library book|sports bag|pencil case"
    ),
    "work_years": lambda rng: str(int(rng.integers(12, 46))),
    "spot_room": [r for r in ROOM if r.startswith("the")],
    "ordinal": _p("first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth"),
    "seat": lambda rng: f"{int(rng.integers(1, 40))}{_pick(rng, 'ABCDEF')}",
    "gate": lambda rng: f"{_pick(rng, 'ABCDE')}{int(rng.integers(1, 60))}",
    "level": lambda rng: (
        _pick(rng, ("level ", "deck ", "zone ")) + _pick(rng, _p("1|2|3|4|5|6|B|C|D|minus 1|minus 2|minus 3"))
    ),
    "plate": lambda rng: (
        "".join(_pick(rng, "ABCDEFGHKLMNPRSTVWXYZ") for _ in range(3)) + f" {int(rng.integers(100, 1000))}"
    ),
    "username": lambda rng: f"{_pick(rng, ADJ)}_{_pick(rng, NOUN)}{int(rng.integers(10, 100))}",
}

# ---------------------------------------------------------------- relations: '# id subject value', then S statements, Q questions, A answers, R reverse, U updates

_TRAIN_TEXT = """
# lives_in person city
S {x} lives in {y}.|{y} is where {x} lives these days.|{x} has a flat in {y} now.|After the divorce {x} settled in {y} and stayed there.|{x} has been based in {y} for years.|Address book: {x} - {y}.
Q Where does {x} live?|Which city is {x} in?|What's {x}'s home town now?|If I wanted to visit {x}, where would I have to go?|{x} lives where again?
A {x} lives in {y}.|{x} is based in {y}.|As far as you told me, {x} has a home in {y}.
R Who lives in {y}?|Which person is based in {y}?
U {x} has moved to {y} now.|Correction: {x} lives in {y}.
# works_as person job
S {x} works as a {y}.|{x} is a {y} by trade.|A {y}, that's what {x} does for a living.|{x} trained for years and became a {y}.|{x} earns money as a {y} at the moment.|I found out that {x} is a {y}, which surprised me.
Q What does {x} do for a living?|What is {x}'s profession?|Which occupation does {x} have?|What kind of work does {x} do?|{x}'s job?
A {x} works as a {y}.|{x} is a {y}.|{x} has a job as a {y}.
R Who works as a {y}?|Which person is a {y}?
U {x} changed careers and is a {y} now.|Update: {x} works as a {y} these days.
# favourite_colour my_person colour
S {x} likes {y} more than any other colour.|The favourite colour of {x} is {y}.|{y} is the colour {x} always picks.|If you ask {x}, nothing looks better than {y}.|{x} wears {y} all the time because it is a favourite.|{x} wants everything in {y}, from curtains to shoes.
Q What is {x}'s favourite colour?|Which shade does {x} prefer?|What colour should I choose for {x}?|I'm buying paint as a surprise for {x}. Which one would be right?|{x}'s colour?
A The favourite colour of {x} is {y}.|{x} likes {y} best.|You should choose {y} for {x}.
R Whose favourite colour is {y}?
U {x} prefers {y} now.|Actually, the favourite colour of {x} is {y}.
# birthday my_person date
S {x} was born on {y}.|{x} has a birthday on {y}.|On {y} we celebrate the birthday of {x}.|{y} is {x}'s birthday.|Calendar entry: birthday of {x}, {y}.|{x} turns a year older on {y}, as always.
Q When is {x}'s birthday?|On which date was {x} born?|When do I need to have a cake ready for {x}?|What day should I congratulate {x}?|{x}'s bday?
A {x}'s birthday is on {y}.|{x} was born on {y}.|You should congratulate {x} on {y}.
R Who was born on {y}?|Whose birthday is {y}?
U I got the date wrong: {x} was born on {y}.|Correction, {x}'s birthday is {y}.
# born_in person town
S {x} comes from {y}.|{x} was born and raised in {y}.|{y} is the place {x} grew up in.|{x}'s childhood home was in {y}.|Originally {x} is from {y}, not from around here.|The family of {x} has its roots in {y}.
Q Where is {x} from originally?|Where did {x} grow up?|What's {x}'s birthplace?|In which town did {x} spend the early years?|{x} is from where?
A {x} comes from {y}.|{x} grew up in {y}.|{y} is where {x} was born.
R Who comes from {y}?|Who grew up in {y}?
U It turns out {x} comes from {y}.|I was mistaken, {x} grew up in {y}.
# studies my_person subject
S {x} is studying {y} at university.|{x} goes to college for {y}.|{y} is what {x} chose as a degree.|{x} has enrolled in {y} this autumn.|{x} is in the second year of {y}.|A degree in {y} is what {x} is working towards.
Q What does {x} study?|Which degree is {x} doing?|What's {x}'s major?|What are {x}'s lectures about?|{x} studies what?
A {x} is studying {y}.|{x} is doing a degree in {y}.|{x}'s major is {y}.
R Who is studying {y}?|Which person is doing a degree in {y}?
U {x} switched to {y}.|{x} dropped out and now studies {y}.
# plays_instrument person instrument
S {x} plays the {y}.|{x} has taken {y} lessons since the age of six.|The {y} is the instrument {x} practises every evening.|{x} is in a band on the {y}.|{x} is really good at the {y}.|You can hear {x} playing the {y} through the wall.
Q Which instrument does {x} play?|What does {x} play in the band?|What musical skill does {x} have?|What can {x} perform on?|{x} plays what?
A {x} plays the {y}.|{x}'s instrument is the {y}.|The instrument {x} plays is the {y}.
R Who plays the {y}?|Who practises the {y}?
U {x} gave that up and plays the {y} now.|{x} has switched to the {y}.
# favourite_food my_person food
S {x} loves {y} more than any other food.|{x}'s favourite dish is {y}.|{y} is what {x} would eat every day.|For {x} there is nothing better than {y}.|Whenever we go out, {x} orders {y} without looking at the menu.|Cook {y} and {x} will be happy.
Q What is {x}'s favourite food?|What does {x} like to eat most?|What should I cook for {x}?|{x} is coming for dinner. What would be a good meal?|{x}'s fave dish?
A {x}'s favourite dish is {y}.|{x} loves {y} most.|You could cook {y} for {x}.
R Who loves {y}?|Whose favourite dish is {y}?
U {x} is tired of that and prefers {y} now.|Scratch that, {x}'s favourite dish is {y}.
# drives person vehicle
S {x} drives a {y}.|{x} bought a {y} last year.|A {y} is what {x} gets around in.|{x} owns a {y} and parks it in front of our house.|The {y} outside belongs to {x}, by the way.|{x} came to work in a {y}.
Q What does {x} drive?|What kind of vehicle does {x} have?|How does {x} get around?|Which car should I look for when {x} arrives?|{x}'s wheels?
A {x} drives a {y}.|{x} has a {y}.|Look for a {y}; that is {x}'s.
R Who drives a {y}?|Who owns a {y}?
U {x} sold it and drives a {y} now.|{x} got a new one, a {y}.
# married_to person full_name
S {x} is married to {y}.|{x} and {y} are husband and wife.|{y} is {x}'s spouse.|{x} married {y} in a small ceremony.|The person {x} shares a life with is called {y}.|Last summer {y} got married to {x}.
Q Who is {x} married to?|What's the name of {x}'s spouse?|Who is {x}'s better half?|Who did {x} choose as a partner for life?|{x}'s spouse?
A {x} is married to {y}.|{x}'s spouse is {y}.|{x}'s partner is called {y}.
R Who is married to {y}?|Who is the spouse of {y}?
U {x} got divorced and is married to {y} now.|Correction: the spouse of {x} is {y}.
# speaks person language
S {x} speaks fluent {y}.|{x} grew up with {y} as a second language.|{y} is a language {x} speaks well.|At home {x} talks {y} with the children.|{x} knows {y}, so ask for help with the letter.|You can talk to {x} in {y}.
Q Which language does {x} speak?|What foreign tongue does {x} know?|In what language could I talk to {x}?|What could {x} translate for us?|{x} speaks what?
A {x} speaks {y}.|{x} knows {y}.|You can talk to {x} in {y}.
R Who speaks {y}?|Who could help with a text in {y}?
U I mixed it up: {x} speaks {y}.|Not that one; {x}'s language is {y}.
# hobby my_person hobby
S {x} spends every free hour on {y}.|{x}'s hobby is {y}.|{y} is what {x} does for fun.|{x} has been into {y} for ages.|Since the pandemic {x} has taken up {y} as a pastime.|{x} is crazy about {y} and talks of nothing else.
Q What is {x}'s hobby?|What does {x} do for fun?|How does {x} spend free time?|What is {x} passionate about?|{x}'s pastime?|What keeps {x} entertained on a Sunday?|If I called {x} on a Sunday, what would I interrupt?
A {x}'s hobby is {y}.|{x} enjoys {y}.|In free time, {x} is into {y}.
R Whose hobby is {y}?|Who is into {y}?
U {x} has a new hobby, {y}.|{x} stopped and now does {y} instead.
# phone_extension person number4
S {x}'s phone extension is {y}.|Dial {y} to reach {x}.|To call {x} inside the building, use {y}.|The internal number of {x} is {y}.|{x} can be called on extension {y}.|Extension {y} goes straight to {x}'s desk.
Q What is {x}'s extension?|Which number do I dial for {x}?|How can I reach {x} by phone in the office?|What do I press to call {x}?|{x}'s ext?
A {x}'s extension is {y}.|Dial {y} for {x}.|You can reach {x} on {y}.
R Whose extension is {y}?|Who picks up when I dial {y}?
U {x} got a new extension: {y}.|{x}'s internal number changed to {y}.
# employer person company
S {x} works for {y}.|{x} has a position at {y}.|{y} is {x}'s employer.|{x} was hired by {y} in spring.|{x} is on the payroll of {y}.|The firm {x} works at is called {y}.
Q Which company does {x} work for?|Who is {x}'s employer?|Where is {x} employed?|Who pays {x}'s salary?|{x}'s company?
A {x} works for {y}.|{x} is employed at {y}.|{x}'s employer is {y}.
R Who works for {y}?|Who is employed at {y}?
U {x} left and joined {y}.|{x} is now at {y}.
# shoe_size my_person shoe_size
S {x} wears shoes in size {y}.|{x}'s shoe size is {y}.|Size {y} fits {x}'s feet.|For {x} I need boots in {y}.|{x} has feet of size {y}.|When you buy sneakers for {x}, take a {y} and nothing smaller.
Q What is {x}'s shoe size?|How big are {x}'s feet?|Which size of boots should I get for {x}?|What number do I ask for when buying sandals for {x}?|{x}'s feet, what size?
A {x} wears size {y}.|{x}'s shoe size is {y}.|Get size {y} for {x}.
R Who wears shoes in size {y}?
U {x}'s feet grew; the size is {y} now.|Sorry, {x} takes a {y} in shoes.
# age my_person age
S {x} is {y} years old.|{x} just turned {y}.|At {y}, {x} still goes running.|{x} is now {y}.|{x} celebrated birthday number {y} last week.|Having reached {y}, {x} feels fine.
Q How old is {x}?|What is {x}'s age?|How many candles go on {x}'s cake?|What age did {x} reach?|{x} is how old?
A {x} is {y} years old.|{x} is {y}.|{x}'s age is {y}.
R Who is {y} years old?
U {x} is {y} now.|I was wrong about the age: {x} is {y}.
# collects person collectable
S {x} collects {y}.|{x} has a huge collection of {y}.|A whole room at {x}'s place is filled with {y}.|{x} hunts for {y} at every flea market.|{y} are what {x} collects.|Since childhood {x} has gathered {y}.
Q What does {x} collect?|What is in {x}'s collection?|What does {x} look for at flea markets?|What could I bring for {x}'s shelf?|{x} collects what?
A {x} collects {y}.|{x} has a collection of {y}.|{x}'s collection consists of {y}.
R Who collects {y}?
U {x} sold everything and collects {y} now.|{x} has moved on to {y}.
# usual_drink my_person drink
S {x} always drinks {y}.|{x}'s usual drink is {y}.|{y} is what {x} orders at the bar.|Give {x} a glass of {y} and all is well.|{x} starts every day with {y}.|When {x} visits, have some {y} in the house.
Q What does {x} drink?|What should I offer {x} to drink?|Which beverage does {x} like?|What do I pour for {x}?|{x}'s usual?
A {x} usually drinks {y}.|You could offer {x} some {y}.|{x}'s usual drink is {y}.
R Who always drinks {y}?
U {x} only drinks {y} now.|{x} has switched to {y}.
# fear my_person fear
S {x} is afraid of {y}.|{x} is scared to death of {y}.|{y} frighten {x} a lot, always have.|{x} can't stand {y} and panics.|One thing terrifies {x}: {y}.|The thought of {y} makes {x} shake.
Q What is {x} afraid of?|What scares {x}?|What should we keep {x} away from?|What is {x}'s phobia?|{x} fears what?
A {x} is afraid of {y}.|{x} is scared of {y}.|The thing {x} fears is {y}.
R Who is afraid of {y}?
U {x} got over that, but is afraid of {y} now.|Correction: {x} is scared of {y}.
# plays_sport person sport
S {x} plays {y} twice a week.|{x} is on the local {y} team.|{y} is {x}'s sport.|{x} trains hard for {y}.|At weekends you will find {x} at {y} practice.|{x} used to be a professional in {y}.
Q Which sport does {x} play?|What team is {x} on?|What does {x} train for?|What athletic thing does {x} do?|{x}'s sport?
A {x} plays {y}.|{x}'s sport is {y}.|{x} is on a {y} team.
R Who plays {y}?
U {x} plays {y} instead now.|After the injury {x} changed to {y}.
# arrived_year person year
S {x} moved here in {y}.|{x} has lived in this street since {y}.|In {y}, {x} came to our village.|It was {y} when {x} arrived here.|{x} became our neighbour in {y}.|Back in {y}, {x} bought the house across the road.
Q When did {x} move here?|Since what year has {x} been around?|In which year did {x} come to our village?|How long ago did {x} show up, what year?|{x} came when?
A {x} moved here in {y}.|{x} has been here since {y}.|It was in {y} that {x} arrived.
R Who moved here in {y}?
U I checked: {x} moved here in {y}.|The right year for {x}'s arrival is {y}.
# reading_about my_person topic
S {x} is reading a book about {y}.|The book on {x}'s bedside table is about {y}.|{x} can't put down that book on {y}.|A thick volume about {y} keeps {x} busy.|{x} borrowed something on {y} from the library.|Right now {x} reads about {y} every night.
Q What is {x} reading about?|What's the topic of {x}'s book?|What subject is on {x}'s bedside table?|What does {x} read before sleeping?|{x}'s book, about what?
A {x} is reading a book about {y}.|{x}'s book is about {y}.|It is a book about {y}.
R Who is reading about {y}?
U {x} finished that and started a book about {y}.|{x} is now reading about {y}.
# reports_to person full_name
S {x}'s manager is {y}.|{x} reports to {y}.|{y} is the boss of {x}.|{x} works under {y}.|All of {x}'s holidays are approved by {y}.|In the org chart, {y} is right above {x}.
Q Who is {x}'s manager?|Who does {x} report to?|Who is above {x} at work?|Who signs off {x}'s holidays?|{x}'s boss?
A {x}'s manager is {y}.|{x} reports to {y}.|{y} is {x}'s boss.
R Who reports to {y}?|Whose manager is {y}?
U {x} has a new manager, {y}.|From now on {x} reports to {y}.
# middle_name my_person first
S {x}'s middle name is {y}.|The second given name of {x} is {y}.|{y} is {x}'s middle name, after a grandparent.|In the passport {x} is also called {y}, as a middle name.|{x} never uses the middle name {y}.|The initial in {x}'s signature stands for {y}.
Q What is {x}'s middle name?|What does {x}'s initial stand for?|What is {x} also called in the passport?|Do you know {x}'s second given name?|{x}'s middle name?|How does {x}'s full name go, between first and last?|What comes between {x}'s first and last name?
A {x}'s middle name is {y}.|The middle name is {y}.|{x}'s second given name is {y}.
R Whose middle name is {y}?
U I misread it, {x}'s middle name is {y}.|{x}'s middle name is actually {y}.
# nickname person nickname
S Everybody calls {x} {y}.|{x}'s nickname is {y}.|{y} is what friends call {x}.|At school {x} was known as {y}.|{x} goes by {y} among friends.|They gave {x} the name {y} in the army.
Q What is {x}'s nickname?|What do friends call {x}?|What name does {x} go by?|What was {x} known as at school?|{x} aka?|What's the short or funny form people use for {x}?|How do mates greet {x}?
A {x}'s nickname is {y}.|Friends call {x} {y}.|{x} goes by {y}.
R Who is called {y}?|Whose nickname is {y}?
U People call {x} {y} these days.|{x} has a new nickname: {y}.
# day_off person day
S {x} is off on {y}.|{x} never works on {y}.|{y} is {x}'s day off.|On {y} you won't find {x} in the office.|{x} takes every {y} free.|Don't call {x} on {y}, that's the free day.
Q When is {x} off?|Which day does {x} not work?|On what day is {x} away from the office?|When should I not expect {x} at work?|{x}'s free day?
A {x} is off on {y}.|{x} does not work on {y}.|{y} is {x}'s day off.
R Who is off on {y}?
U {x}'s day off moved to {y}.|{x} is free on {y} instead now.
# owes_me person price
S {x} owes me {y}.|I lent {y} to {x} last week.|{x} still has to pay me back {y}.|{y} is what I should get back from {x}.|{x} borrowed {y} from me for lunch.|I'm waiting for {x} to return {y} to me.
Q How much does {x} owe me?|What did I lend to {x}?|How much money should I get back from {x}?|What is {x}'s debt to me?|{x} owes how much?
A {x} owes you {y}.|You lent {x} {y}.|You should get {y} back from {x}.
R Who owes me {y}?
U With interest, {x} owes me {y} now.|I added it up again, {x} owes me {y}.
# borrowed_object person object
S {x} borrowed my {y}.|I gave my {y} to {x} for a few days.|My {y} is at {x}'s house at the moment.|{x} still has my {y}.|{x} asked for my {y} and I said yes.|I lent a {y} to {x} on Sunday.
Q What did {x} borrow from me?|What of mine does {x} still have?|What did I lend {x}?|Which of my belongings is with {x}?|{x} has my what?
A {x} borrowed your {y}.|{x} still has your {y}.|You lent {x} your {y}.
R Who borrowed my {y}?|Who has my {y}?
U {x} brought that back but took my {y}.|Correction: {x} borrowed my {y}.
# holiday my_person country
S {x} is going on holiday to {y}.|{x} has booked a trip to {y}.|{y} is where {x} will spend the summer holidays.|{x} is flying to {y} for two weeks.|This year {x} travels to {y} with friends.|{x} has a ticket for {y} in the drawer.
Q Where is {x} going on holiday?|Which country will {x} visit?|What is {x}'s travel destination?|Where will {x} send postcards from?|{x}'s holiday, where?
A {x} is going on holiday to {y}.|{x} has booked a trip to {y}.|{x}'s destination is {y}.
R Who is going to {y}?|Who has booked a trip to {y}?
U {x} changed plans and is going to {y}.|The trip was cancelled; {x} is flying to {y} instead.
# height my_person height
S {x} is {y} tall.|{x} measures {y}.|At {y}, {x} is the tallest in the class.|They measured {x} at the doctor: {y}.|{x}'s height is {y}.|{x} has grown to {y} this year.
Q How tall is {x}?|What is {x}'s height?|What did the doctor measure for {x}?|How far up does {x} reach, in cm?|{x}, how tall?
A {x} is {y} tall.|{x} measures {y}.|{x}'s height is {y}.
R
U {x} has grown and is {y} tall now.|Measured again: {x} is {y}.
# wake_time my_person morning
S {x} gets up at {y}.|{x}'s alarm rings at {y}.|At {y}, {x} is already awake.|{x} wakes up at {y} every day.|Even on holiday {x} is out of bed at {y}.|{y} is when {x} rises.
Q When does {x} get up?|What time does {x}'s alarm ring?|From when on is {x} awake?|How early does {x} start the day?|{x} up at?
A {x} gets up at {y}.|{x} wakes up at {y}.|{x}'s alarm rings at {y}.
R Who gets up at {y}?
U {x} gets up at {y} now.|With the new job, {x} has to wake up at {y}.
# music_genre person genre
S {x} listens to {y} all day.|{x} is a big fan of {y}.|{y} is the music {x} likes.|In the car {x} always plays {y}.|{x} only goes to {y} concerts.|{x}'s record shelf is full of {y}.
Q What music does {x} like?|Which genre does {x} listen to?|What kind of concert would {x} enjoy?|What comes out of {x}'s car speakers?|{x}'s music?
A {x} listens to {y}.|{x} likes {y}.|{x} is a fan of {y}.
R Who listens to {y}?
U {x} is into {y} now.|{x}'s taste changed to {y}.
# grows my_person plant
S {x} grows {y} in the garden.|{x} planted {y} this spring.|There are {y} all over {x}'s garden.|{y} are what {x} has on the balcony.|{x}'s {y} did very well this year.|{x} gave us some home-grown {y} again.
Q What does {x} grow?|What did {x} plant?|What can be found in {x}'s garden?|What would {x} be watering?|{x}'s garden has what?
A {x} grows {y}.|{x} planted {y}.|In {x}'s garden there are {y}.
R Who grows {y}?|Who has {y} in the garden?
U {x} dug that up and grows {y} now.|This season {x} planted {y}.
# lives_on_street person street
S {x} lives on {y}.|{x}'s house is on {y}.|{y} is the street where {x} lives.|You'll find {x}'s home on {y}, next to a kiosk.|{x} rents a place on {y}.|The taxi should pick up {x} on {y}.
Q Which street does {x} live on?|What street is {x}'s house on?|Where should the taxi pick {x} up?|What do I write on the envelope to {x} as street?|{x}'s street?
A {x} lives on {y}.|{x}'s house is on {y}.|The street is {y}.
R Who lives on {y}?
U {x} moved to {y}.|{x}'s new street is {y}.
# lives_on_floor my_person ordinal
S {x} lives on the {y} floor.|{x}'s apartment is on the {y} floor.|You have to climb to the {y} floor to see {x}.|On the {y} floor, that's {x}'s door.|{x} has the flat on the {y} floor.|Press the button for the {y} floor if you visit {x}.
Q Which floor does {x} live on?|How high up is {x}'s apartment?|What lift button do I press for {x}?|How many storeys up do I go to see {x}?|{x}'s floor?
A {x} lives on the {y} floor.|{x}'s flat is on the {y} floor.|It is the {y} floor.
R Who lives on the {y} floor?
U {x} moved to the {y} floor.|It's the {y} floor for {x} now.
# commute_bus person number2
S {x} takes bus {y} to work.|Bus {y} brings {x} to the office.|{x} commutes on line {y}.|{x} is always on the number {y} in the morning.|To get to work, {x} catches the {y}.|I met {x} on bus {y} yesterday, as every day.
Q Which bus does {x} take?|What line does {x} use to get to work?|How does {x} commute, which number?|On which bus could I meet {x}?|{x}'s bus?
A {x} takes bus {y}.|{x} commutes on line {y}.|It is bus {y}.
R Who takes bus {y}?
U {x} takes bus {y} now.|The line was cut, so {x} uses bus {y}.
# children_count person small
S {x} has {y} children.|{x} is a parent of {y}.|There are {y} kids at {x}'s home.|{x} raised {y} children alone.|With {y} children, {x} is always busy.|The family of {x} includes {y} kids.
Q How many children does {x} have?|How big is {x}'s family, how many kids?|How many sons and daughters has {x} got?|How many school bags does {x} pack?|{x}'s kids, how many?
A {x} has {y} children.|{x} has {y} kids.|There are {y} children in {x}'s family.
R Who has {y} children?
U Another birth: {x} has {y} children now.|I counted wrong, {x} has {y} kids.
# learning_skill my_person skill
S {x} is learning to {y}.|{x} wants to {y} and takes lessons.|To {y} is what {x} is being taught this month.|A teacher is showing {x} how to {y}.|{x} signed up for a class to {y}.|{x} can almost {y} now, after many lessons.
Q What is {x} learning?|What is {x} being taught?|Which new skill is {x} picking up?|What are {x}'s lessons for?|{x} learns what?
A {x} is learning to {y}.|{x} takes lessons to {y}.|The skill is to {y}.
R Who is learning to {y}?
U {x} quit and is learning to {y} now.|{x} has moved on and is learning to {y}.
# lost_object person portable
S {x} lost a {y} on the train.|{x} can't find the {y} anywhere.|A {y} went missing from {x}'s bag.|{x} left a {y} somewhere and is looking for it.|The {y} of {x} was stolen.|If you see a {y}, it is {x}'s.
Q What did {x} lose?|What is {x} looking for?|What went missing from {x}'s bag?|What should I give back to {x} if I find it?|{x} lost what?
A {x} lost a {y}.|{x} is looking for a {y}.|It was a {y}.
R Who lost a {y}?
U That turned up, but now {x} lost a {y}.|It was a {y} that {x} lost, not the other thing.
# starts_job_month person month
S {x} starts the new job in {y}.|{x} begins with us in {y}.|In {y}, {x} will join the team.|{y} is when {x} comes on board.|{x} signed the contract and begins in {y}.|We need a desk for {x} from {y} on.
Q When does {x} start the new job?|In which month does {x} join?|When do we need a desk for {x}?|From when is {x} on board?|{x} starts when?|When is {x}'s first working day, roughly?|When will we see {x} at the office?
A {x} starts in {y}.|{x} joins in {y}.|{x} will be on board in {y}.
R Who starts in {y}?
U {x}'s start was moved to {y}.|{x} begins in {y} instead.
# door_code place number4
S The door code of {x} is {y}.|To get into {x}, type {y}.|{y} opens the door of {x}.|The keypad at {x} wants {y}.|Code for {x}: {y}.|You need {y} to unlock {x} after six.
Q What is the door code of {x}?|How do I get into {x}?|What do I type on the keypad at {x}?|Which digits unlock {x}?|Code for {x}?|I'm standing outside {x}. How do I enter?|Which PIN does {x} have?
A The door code of {x} is {y}.|Type {y} to get into {x}.|{y} opens {x}.
R Which door opens with {y}?|What is {y} the code for?
U The code of {x} was changed to {y}.|New code for {x}: {y}.
# kept_at thing spot
S {x} is {y}.|I put {x} {y}.|You can find {x} {y}.|We keep {x} {y} all year.|{y} is where I left {x}.|I tidied up and moved {x}; it sits {y} now.
Q Where is {x}?|Where did I put {x}?|Where can I find {x}?|I can't find {x}. Any idea?|I need {x}, where do I have to look?
A {x} is {y}.|You put {x} {y}.|Have a look {y}; that is where you left {x}.
R What is {y}?|What did I put {y}?
U I moved {x}; it is {y} now.|{x} isn't there any more, I put it {y}.
# thing_price device price
S {x} cost {y}.|I paid {y} for {x}.|We spent {y} on {x}.|{y} is what they charged for {x}.|{x} was on sale for {y}.|The receipt for {x} says {y}.
Q How much did {x} cost?|What did I pay for {x}?|What was the price of {x}?|How expensive was {x}?|{x}, how much?
A {x} cost {y}.|You paid {y} for {x}.|The price of {x} was {y}.
R What cost {y}?
U I looked at the receipt again: {x} cost {y}.|After the refund {x} cost {y}.
# opening_time shop morning
S {x} opens at {y}.|From {y} on you can go to {x}.|At {y} they unlock the doors of {x}.|The sign at {x} says open from {y}.|{x} doesn't open before {y}.|Don't go to {x} before {y}, it is closed.
Q When does {x} open?|What time can I go to {x}?|From when on is {x} open?|How early can I be at {x}?|{x} opens?
A {x} opens at {y}.|You can go to {x} from {y} on.|The doors of {x} open at {y}.
R What opens at {y}?
U {x} has new hours and opens at {y}.|Since this week, {x} opens at {y}.
# closed_day shop day
S {x} is closed on {y}.|On {y} there is nobody at {x}.|{y} is the day when {x} stays shut.|{x} does not open on {y}.|Every {y}, {x} has its rest day.|Forget about {x} on {y}, the doors are shut.
Q Which day is {x} closed?|When is {x} shut?|On what day should I not go to {x}?|When is the rest day of {x}?|{x} closed when?|I want to shop at {x}. Which weekday is a bad idea?|When would a trip to {x} be useless?
A {x} is closed on {y}.|{x} stays shut on {y}.|Don't go to {x} on {y}.
R What is closed on {y}?
U {x} is now closed on {y} instead.|{x} changed the rest day to {y}.
# deadline project date
S The deadline for {x} is {y}.|{x} must be finished by {y}.|By {y} we have to deliver {x}.|{y} is the due date for {x}.|The client wants {x} done by {y}.|We have until {y} to complete {x}.
Q What is the deadline for {x}?|When is {x} due?|By when must {x} be done?|How long do we have for {x}?|{x} due?
A The deadline for {x} is {y}.|{x} is due on {y}.|{x} must be finished by {y}.
R What is due on {y}?
U The deadline for {x} was moved to {y}.|We got more time: {x} is due on {y}.
# project_lead project full_name
S {x} is led by {y}.|{y} is in charge of {x}.|The head of {x} is {y}.|They asked {y} to run {x}.|For {x}, the person responsible is {y}.|Questions about {x} go to {y}, who runs it.
Q Who leads {x}?|Who is in charge of {x}?|Who is responsible for {x}?|Who do I ask about {x}?|{x}, whose baby is it?
A {x} is led by {y}.|{y} is in charge of {x}.|The person responsible for {x} is {y}.
R What is {y} in charge of?|What does {y} lead?
U {y} has taken over {x}.|{x} is now led by {y}.
# project_budget project bigprice
S The budget for {x} is {y}.|We have {y} to spend on {x}.|{y} was approved for {x}.|{x} may cost at most {y}.|Finance set aside {y} for {x}.|{x} got funding of {y}.
Q What is the budget for {x}?|How much money is there for {x}?|What did finance approve for {x}?|How much may {x} cost?|{x} budget?
A The budget for {x} is {y}.|There is {y} for {x}.|{x} may cost {y}.
R Which project has a budget of {y}?
U The budget for {x} was changed to {y}.|They cut the money for {x}; it's {y} now.
# project_meeting project day
S The team of {x} meets every {y}.|Meetings about {x} are on {y}.|On {y} we sit together for {x}.|{y} is the weekly meeting for {x}.|We talk about {x} each {y} after lunch.|Weekly call for {x}: {y}.
Q When does the team of {x} meet?|On which day is the call about {x}?|When do we sit together for {x}?|What weekday do I keep free for {x}?|{x} meeting when?
A The meetings for {x} are on {y}.|The team of {x} meets on {y}.|{y} is the day for {x}.
R Which project has its meeting on {y}?
U The meeting for {x} moved to {y}.|From now on, {x} is discussed on {y}.
# project_codename project passphrase
S The code name for {x} is {y}.|Internally we call {x} {y}.|{y} is the internal name of {x}.|In emails {x} is only referred to as {y}.|{x} runs under the label {y}.|The word {y} stands for {x} in our notes.
Q What is the code name for {x}?|What do we call {x} internally?|Under which label does {x} run?|How is {x} referred to in emails?|{x} codename?
A The code name for {x} is {y}.|Internally, {x} is called {y}.|{x} runs under the label {y}.
R What does the code name {y} stand for?|Which project is called {y}?
U The code name for {x} was changed to {y}.|{x} has been renamed {y} in our notes.
# event_date event date
S {x} is on {y}.|{x} takes place on {y}.|On {y} there is {x}.|{y} is the date of {x}.|They scheduled {x} for {y}.|Keep {y} free for {x}.
Q When is {x}?|On which date is {x}?|Which day should I keep free for {x}?|What did they schedule {x} for?|{x}, when?
A {x} is on {y}.|{x} takes place on {y}.|The date of {x} is {y}.
R What is on {y}?|What happens on {y}?
U {x} was moved to {y}.|New date for {x}: {y}.
# event_venue event venue
S {x} will be held at {y}.|{x} is at {y} this time.|We are meeting at {y} for {x}.|{y} is the venue of {x}.|They rented {y} for {x}.|For {x} you have to come to {y}.
Q Where is {x}?|What is the venue of {x}?|Where do I have to go for {x}?|Which place did they rent for {x}?|{x}, where?
A {x} is at {y}.|The venue of {x} is {y}.|You have to go to {y} for {x}.
R What takes place at {y}?
U {x} was moved to {y}.|New venue for {x}: {y}.
# event_time event evening
S {x} starts at {y}.|{x} begins at {y} sharp.|At {y} they open with {x}.|Be there by {y} for {x}.|{y} is the starting time of {x}.|The invitation to {x} says {y}.
Q What time does {x} start?|At what hour does {x} begin?|When do I have to be there for {x}?|What time is on the invitation to {x}?|{x}, what time?
A {x} starts at {y}.|{x} begins at {y}.|You have to be there at {y} for {x}.
R What starts at {y}?
U {x} starts at {y} instead.|They moved the start of {x} to {y}.
# event_guests event people
S There will be {y} guests at {x}.|{y} people are coming to {x}.|We expect {y} visitors for {x}.|{x} has {y} registered guests.|The list for {x} has {y} names on it.|{x} was planned for {y} people.
Q How many guests come to {x}?|How many people are expected at {x}?|How large is the crowd at {x}?|How many chairs do we need for {x}?|{x} headcount?
A There will be {y} guests at {x}.|{y} people are coming to {x}.|The number of guests for {x} is {y}.
R
U More replies came in: {x} has {y} guests now.|The number of people for {x} changed to {y}.
# event_food event food
S They serve {y} at {x}.|There will be {y} at {x}.|{y} is on the menu for {x}.|The caterer makes {y} for {x}.|At {x} everybody gets {y}.|We ordered {y} for {x}, enough for all.
Q What is there to eat at {x}?|What do they serve at {x}?|What is on the menu for {x}?|What did the caterer plan for {x}?|{x} food?
A They serve {y} at {x}.|There will be {y} at {x}.|{y} is on the menu.
R Where will they serve {y}?
U The menu for {x} changed to {y}.|Instead they serve {y} at {x}.
# pet_age pet petage
S {x} is {y} years old.|{x} turned {y} this spring.|{x} has reached the age of {y}.|With {y} years, {x} is no longer young.|{y} is the age of {x}.|The vet thinks {x} is about {y} years old.
Q How old is {x}?|What is the age of {x}?|How many years has {x} lived?|What did the vet say about {x}'s age?|{x}'s age?
A {x} is {y} years old.|The age of {x} is {y}.|{x} is {y}.
R Which animal is {y} years old?
U {x} is {y} now.|The papers say {x} is {y}.
# pet_food pet petfood
S {x} eats nothing but {y}.|{x} gets {y} for dinner.|{y} is what we feed {x}.|{x} goes mad for {y}.|The bowl of {x} is always filled with {y}.|If {x} is hungry, give it {y}.
Q What does {x} eat?|What do we feed {x}?|What goes into the bowl of {x}?|What treat does {x} love?|Food for {x}?
A {x} eats {y}.|You feed {x} {y}.|{x} loves {y}.
R Which animal eats {y}?
U {x} is on a diet and gets {y} now.|We changed the food of {x} to {y}.
# pet_sleeps pet petspot
S {x} sleeps {y}.|{x}'s bed is {y}.|At night {x} lies down {y}.|{y} is where {x} sleeps.|{x} always curls up {y} for a nap.|{x} made itself a bed {y}.
Q Where does {x} sleep?|Where is the bed of {x}?|Where does {x} take a nap?|Where do I look for {x} at night?|{x}'s bed?|Where does {x} spend the dark hours?|Which spot does {x} rest in?
A {x} sleeps {y}.|The bed of {x} is {y}.|At night {x} is {y}.
R Who sleeps {y}?
U {x} sleeps {y} now.|We moved the bed of {x}; it is {y}.
# pet_breed my_person breed
S {x} has a {y}.|{x}'s dog is a {y}.|A {y} is what {x} walks every morning.|{x} got a {y} from the shelter.|{x} chose a {y} as a dog.|The {y} in the yard is {x}'s dog.
Q What kind of dog does {x} have?|What breed is {x}'s dog?|Which dog did {x} get from the shelter?|What does {x} walk every morning?|{x}'s dog?|What kind of pet does {x} own?|Which race of hound lives with {x}?
A {x} has a {y}.|{x}'s dog is a {y}.|It is a {y}.
R Who has a {y}?
U {x} has a {y} now.|I got the breed wrong: {x} has a {y}.
# pet_vet pet full_name
S {x}'s vet is {y}.|We take {x} to {y} for the shots.|{y} is the vet who treats {x}.|When {x} is ill, we call {y}.|{x} had an operation by {y}.|The animal doctor of {x} is called {y}.
Q Who is {x}'s vet?|Who treats {x}?|Who do we call when {x} is ill?|Who gave {x} the shots?|Vet for {x}?|Where does {x} get medical help, who is it?|{x} is limping. Who can help?|Which professional looks after {x}'s health?
A {x}'s vet is {y}.|{y} treats {x}.|You take {x} to {y}.
R Which animal does {y} treat?
U We changed vets, {x} goes to {y} now.|{x}'s new vet is {y}.
# pet_toy pet pettoy
S {x} loves to play with a {y}.|{x}'s favourite toy is a {y}.|A {y} keeps {x} busy for hours.|{x} carries a {y} around all day.|Throw a {y} and {x} runs.|We gave {x} a {y} to play with.
Q What does {x} play with?|What is {x}'s favourite toy?|What does {x} carry around?|What keeps {x} busy?|{x}'s toy?
A {x} plays with a {y}.|{x}'s favourite toy is a {y}.|It is a {y}.
R Who plays with a {y}?
U {x} has a new toy, a {y}.|That one broke; {x} plays with a {y} now.
# company_city company city
S {x} has its headquarters in {y}.|The main office of {x} is in {y}.|{y} is home to the firm {x}.|{x} is run from {y}.|{x} is a business from {y}.|The founders opened {x} in {y} and never left.
Q Where is {x} based?|In which city are the headquarters of {x}?|Where is the main office of {x}?|Where would I send a letter to {x}?|{x} HQ?
A {x} is based in {y}.|The headquarters of {x} are in {y}.|The main office of {x} is in {y}.
R Which company is based in {y}?
U {x} moved its main office to {y}.|{x} is now run from {y}.
# company_product company product
S {x} makes {y}.|{x} is a maker of {y}.|{y} are the main product of {x}.|A lot of {y} leave the factory of {x} every day.|{x} earns its money with {y}.|People know {x} for its {y}.
Q What does {x} make?|What is the main product of {x}?|What does the factory of {x} produce?|What would I buy from {x}?|{x} sells?
A {x} makes {y}.|The main product of {x} is {y}.|{x} produces {y}.
R Which company makes {y}?|Who produces {y}?
U {x} makes {y} now.|{x} gave that up and produces {y}.
# company_founded company year
S {x} was founded in {y}.|{x} has existed since {y}.|In {y} two friends started {x}.|{y} is the founding year of {x}.|{x} began in a garage in {y}.|The history of {x} goes back to {y}.
Q When was {x} founded?|Since when does {x} exist?|In which year did {x} begin?|How old is {x}, from what year?|{x} since?
A {x} was founded in {y}.|{x} has existed since {y}.|{x} began in {y}.
R Which company was founded in {y}?
U The website says {x} was founded in {y}.|Wrong year: {x} began in {y}.
# company_ceo company full_name
S The director of {x} is {y}.|{x} is run by {y}.|{y} is the chief executive of {x}.|At the top of {x} stands {y}.|{x} hired {y} as director.|The board of {x} elected {y} as CEO.
Q Who runs {x}?|Who is the director of {x}?|Who is at the top of {x}?|What's the name of the chief executive at {x}?|{x} CEO?
A The director of {x} is {y}.|{x} is run by {y}.|{y} is the chief executive of {x}.
R Which company is run by {y}?|What does {y} run?
U {x} has a new director, {y}.|{y} took over at {x}.
# company_staff company number3
S {x} has {y} employees.|{y} people work at {x}.|The staff of {x} counts {y}.|There are {y} people on the staff of {x}.|{x} gives work to {y} people.|{x} has grown to {y} workers.
Q How many employees does {x} have?|How many people work at {x}?|How large is the staff of {x}?|How big is {x}?|{x} staff count?
A {x} has {y} employees.|{y} people work at {x}.|The staff of {x} counts {y} people.
R Which company has {y} employees?
U After the layoffs {x} has {y} employees.|{x} is now at {y} employees.
# room_colour room colour
S The walls of {x} are {y}.|We painted {x} {y}.|{x} is {y} all over.|{y} is the colour of {x}.|They did {x} in {y} last summer.|{x} got a coat of {y} paint.
Q What colour is {x}?|How did we paint {x}?|What do the walls of {x} look like?|Which paint did we use for {x}?|{x} walls?
A {x} is {y}.|The walls of {x} are {y}.|You painted {x} {y}.
R Which room is {y}?
U We repainted {x}; it is {y} now.|{x} is no longer that colour, it's {y}.
# room_capacity hall people
S {x} holds {y} people.|Up to {y} people fit in {x}.|{y} is the limit for {x}.|{x} has space for {y} people.|No more than {y} visitors are allowed in {x}.|There is room for {y} in {x}.
Q How many people fit in {x}?|What is the capacity of {x}?|How many are allowed in {x}?|How much space is there in {x}, in people?|{x} limit?
A {x} holds {y} people.|Up to {y} people fit in {x}.|The limit for {x} is {y}.
R Which room holds {y} people?
U After the fire check {x} holds {y} people.|The limit for {x} is now {y}.
# room_floor room flooring
S The floor in {x} is {y}.|We put {y} in {x} as flooring.|{y} covers the floor of {x}.|{x} has {y} on the ground.|In {x} you walk on {y}.|They laid {y} in {x} last month.
Q What is the floor in {x} made of?|What covers the ground in {x}?|What flooring does {x} have?|What do you walk on in {x}?|{x} floor?
A The floor in {x} is {y}.|{x} has {y} on the floor.|In {x} it is {y}.
R Which room has {y} on the floor?
U The floor in {x} was replaced with {y}.|{x} has {y} on the floor now.
# room_picture room picture
S The painting in {x} shows {y}.|In {x} hangs a picture of {y}.|There is a picture of {y} on the wall of {x}.|We hung a print of {y} in {x}.|{y} is what you see on the picture in {x}.|On the big canvas in {x} somebody painted {y}.
Q What does the painting in {x} show?|What is on the picture in {x}?|What hangs on the wall of {x}?|What did the artist paint for {x}?|{x} picture?|What artwork is in {x}?|What motif decorates {x}?
A The painting in {x} shows {y}.|It is a picture of {y}.|In {x} hangs a picture of {y}.
R Which room has a picture of {y}?
U We swapped the picture in {x}; it shows {y} now.|The new painting in {x} shows {y}.
# place_phone place number7
S The phone number of {x} is {y}.|Call {y} for {x}.|You reach {x} by phone at {y}.|{y} is the number of {x}.|To book {x}, ring {y}.|Write down the telephone of {x}: {y}.
Q What is the phone number of {x}?|How can I call {x}?|Which number do I ring to book {x}?|What do I dial for {x}?|{x} phone?
A The phone number of {x} is {y}.|Call {y} for {x}.|You can reach {x} at {y}.
R Whose phone number is {y}?
U {x} has a new phone number: {y}.|The number of {x} changed to {y}.
# place_address place address
S The address of {x} is {y}.|{x} is at {y}.|At {y} you will find {x}.|{y} is where {x} stands.|Go to {y} for {x}.|Tell the driver {y}, that's {x}.
Q What is the address of {x}?|Where exactly is {x}?|What do I tell the driver to get to {x}?|Which house number and street is {x}?|{x} address?
A The address of {x} is {y}.|{x} is at {y}.|You will find {x} at {y}.
R What is at {y}?
U {x} moved to {y}.|New address of {x}: {y}.
# place_built place old_year
S {x} was built in {y}.|{x} dates from {y}.|In {y} they finished {x}.|The stone over the entrance of {x} says {y}.|{y} is the year of construction of {x}.|Work on {x} was completed in {y}, long before our time.
Q When was {x} built?|How old is {x}, what year is it from?|What year is on the stone at {x}?|In which year was {x} completed?|{x} built?
A {x} was built in {y}.|{x} dates from {y}.|It was completed in {y}.
R What was built in {y}?
U The records say {x} was built in {y}.|Correction: {x} dates from {y}.
# place_key place person
S {y} has the key to {x}.|The key for {x} is with {y}.|Ask {y} for the key to {x}.|{x} can only be unlocked by {y}.|We left the key of {x} with {y}.|If {x} is locked, go and see {y}.
Q Who has the key to {x}?|Who can let me into {x}?|Who do I ask if {x} is locked?|Who can unlock {x}?|{x} key?
A {y} has the key to {x}.|You can ask {y} for the key to {x}.|The key for {x} is with {y}.
R What does {y} have the key to?
U {y} has the key to {x} now.|The key for {x} was passed on to {y}.
# made_of furniture material
S {x} is made of {y}.|{x} is solid {y}.|They used {y} for {x}.|{y} is the material of {x}.|I ordered {x} in {y}.|The carpenter built {x} out of {y} for us.
Q What is {x} made of?|Which material is {x}?|What did they use for {x}?|What stuff was {x} built from?|{x} material?
A {x} is made of {y}.|The material of {x} is {y}.|They used {y} for {x}.
R What is made of {y}?
U I looked closer, {x} is made of {y}.|The new version of {x} is {y}.
# thing_colour thing colour
S {x} is {y}.|I picked {x} in {y}.|{y} is the colour of {x}.|{x} comes in {y}.|Look for something {y}, that's {x}.|Somebody sprayed {x} {y} for fun.
Q What colour is {x}?|How do I recognise {x}?|In which colour did I pick {x}?|What does {x} look like?|{x} colour?
A {x} is {y}.|The colour of {x} is {y}.|You picked {x} in {y}.
R What is {y}?
U I repainted {x}; it's {y} now.|No, wait, {x} is {y}.
# device_brand device brand
S {x} is a {y}.|{x} was made by {y}.|We bought {x} from {y}.|{y} is the brand of {x}.|The label on {x} says {y}.|For {x} we trusted {y} again.
Q What brand is {x}?|Who made {x}?|Which manufacturer is {x} from?|What name is on the label of {x}?|{x} brand?
A {x} is from {y}.|The brand of {x} is {y}.|{x} was made by {y}.
R What was made by {y}?|Which of our devices is from {y}?
U We replaced {x}; the new one is from {y}.|Correction: {x} was made by {y}.
# bought_in thing city
S I bought {x} in {y}.|{x} is from a shop in {y}.|{y} is where I got {x}.|I found {x} on a trip to {y}.|{x} came with me from {y}.|In {y} somebody sold me {x}.
Q Where did I buy {x}?|In which city did I get {x}?|Where is {x} from?|On which trip did I find {x}?|{x}, bought where?
A You bought {x} in {y}.|{x} is from {y}.|You got {x} in {y}.
R What did I buy in {y}?
U I remember now, I bought {x} in {y}.|Not there: {x} is from {y}.
# weight thing weight
S {x} weighs {y}.|On the scale {x} shows {y}.|{y} is the weight of {x}.|{x} is heavy, it weighs {y}.|According to the label {x} has a weight of {y}, so be careful.|I carried {x}, all {y} of it.
Q How much does {x} weigh?|How heavy is {x}?|What does the scale say for {x}?|How many kilos is {x}?|{x} weight?
A {x} weighs {y}.|The weight of {x} is {y}.|On the scale {x} shows {y}.
R What weighs {y}?
U I weighed {x} again: {y}.|With the contents {x} weighs {y}.
# warranty device future_year
S The warranty of {x} runs until {y}.|{x} is under guarantee until {y}.|Until {y} they repair {x} for free.|{y} is when the guarantee for {x} ends.|If {x} breaks before {y}, it costs nothing.|The guarantee card of {x} is valid to {y}.
Q How long is the warranty of {x}?|Until when do they repair {x} for free?|When does the guarantee for {x} end?|In what year do I start paying for repairs to {x}?|{x} warranty?
A The warranty of {x} runs until {y}.|{x} is under guarantee until {y}.|The guarantee for {x} ends in {y}.
R
U I extended the warranty of {x} to {y}.|The guarantee for {x} now ends in {y}.
# gift_from thing person
S {x} was a present from {y}.|{y} gave me {x}.|I got {x} from {y}.|For my birthday {y} brought me {x}.|{x} used to belong to {y}.|I have {x} thanks to {y}.
Q Who gave me {x}?|Who did I get {x} from?|Who should I thank for {x}?|Who used to own {x}?|{x}, from whom?
A {x} was a present from {y}.|{y} gave you {x}.|You got {x} from {y}.
R What did {y} give me?|What did I get from {y}?
U I remember it differently now: {y} gave me {x}.|Correction: {x} is from {y}.
# broken_part device part
S The {y} of {x} is broken.|{x} has a broken {y}.|I need a new {y} for {x}.|{x} stopped working because of the {y}.|The repair man says the {y} in {x} is worn out.|A damaged {y} is the trouble with {x}.
Q What is broken on {x}?|What's wrong with {x}?|Which spare part do I need for {x}?|Why did {x} stop working?|{x} problem?
A The {y} of {x} is broken.|{x} has a broken {y}.|You need a new {y} for {x}.
R What has a broken {y}?
U That was fixed, but now the {y} of {x} is broken.|The mechanic says it is the {y} of {x}.
# serial_number device number6
S The serial number of {x} is {y}.|On the back of {x} it says {y}.|The digits {y} belong to {x}.|{y} is printed on the bottom of {x}.|Serial no. for {x}: {y}.|For support about {x}, give them {y}.
Q What is the serial number of {x}?|Which number is on the back of {x}?|What do I tell support about {x}?|Under what number is {x} registered?|{x} serial?|What's the ID of {x}?|Which identification does {x} carry?
A The serial number of {x} is {y}.|It says {y} on the back of {x}.|{x} is registered under {y}.
R Which device has the serial number {y}?
U I misread it: the serial number of {x} is {y}.|{x} was swapped; the new serial number is {y}.
# secret_ingredient dish ingredient
S The secret ingredient in {x} is {y}.|I always put {y} in {x}.|{x} tastes so good because of the {y}.|A bit of {y} goes into {x}.|{y} makes {x} special.|Don't forget the {y} when you make {x}.
Q What is the secret ingredient in {x}?|What makes {x} special?|Why does {x} taste so good?|What must I not forget when I make {x}?|{x} secret?|What's the trick with {x}?|How do I improve the flavour of {x}?
A The secret ingredient in {x} is {y}.|You put {y} in {x}.|It is the {y} that makes {x} special.
R Where do I put {y}?|Which recipe needs {y}?
U I use {y} in {x} now.|I improved {x}; the secret is {y}.
# oven_temperature dish degrees
S {x} goes in the oven at {y}.|Bake {x} at {y}.|{y} is the right heat for {x}.|Heat the oven to {y} for {x}.|For {x} I set the dial to {y}.|At {y}, {x} turns out perfect.
Q How hot should the oven be for {x}?|At what temperature do I bake {x}?|What do I set the dial to for {x}?|What is the right heat for {x}?|{x}, how hot?
A {x} goes in the oven at {y}.|Bake {x} at {y}.|The right heat for {x} is {y}.
R What goes in the oven at {y}?
U {x} burned, so I use {y} now.|New setting for {x}: {y}.
# cooking_time dish minutes
S {x} takes {y}.|Leave {x} in for {y}.|After {y}, {x} is ready.|{y} is enough for {x}.|Set the timer to {y} for {x}.|{x} has to cook for {y}, no longer.
Q How long does {x} take?|What do I set the timer to for {x}?|When is {x} ready?|How many minutes for {x}?|{x}, how long?
A {x} takes {y}.|{x} is ready after {y}.|Set the timer to {y} for {x}.
R What takes {y}?
U With the new oven {x} takes {y}.|Better leave {x} in for {y}.
# watering_day houseplant day
S {x} needs water on {y}.|We water {x} every {y}.|{y} is when {x} gets its water.|Give {x} a drink on {y}.|On {y} it's time to water {x}.|{x} dries out unless you pour something in on {y}.
Q When does {x} need water?|Which day do we water {x}?|When should I take the watering can to {x}?|On what day is {x} thirsty?|Water {x} when?
A {x} needs water on {y}.|Water {x} on {y}.|{y} is the day for {x}.
R What needs water on {y}?
U I water {x} on {y} now.|The new watering day for {x} is {y}.
# departure route time
S {x} leaves at {y}.|{x} departs at {y}.|At {y}, {x} pulls out.|The timetable says {y} for {x}.|We have to catch {x} at {y}.|{y} is the departure time of {x}.
Q When does {x} leave?|What time is the departure of {x}?|What does the timetable say for {x}?|How late can I be for {x}?|{x} goes when?
A {x} leaves at {y}.|{x} departs at {y}.|The timetable says {y} for {x}.
R What leaves at {y}?
U {x} leaves at {y} from this month.|The timetable changed: {x} departs at {y}.
# town_population town population
S {x} has {y} inhabitants.|{y} people live in the town of {x}.|The population of {x} is {y}.|In {x} they counted {y} residents.|{x} is home to {y} people.|{x} has shrunk to {y} inhabitants.
Q How many people live in {x}?|What is the population of {x}?|How large is the town of {x}?|How many residents were counted in {x}?|{x} inhabitants?
A {x} has {y} inhabitants.|The population of {x} is {y}.|{y} people live in {x}.
R Which town has {y} inhabitants?
U The new census gives {x} {y} inhabitants.|{x} has {y} residents now.
# town_known_for town product
S {x} is known for its {y}.|People visit {x} for the {y}.|{y} made {x} famous.|The town of {x} is proud of its {y}.|The best {y} come from {x}.|When you hear {x}, you think of {y}.
Q What is {x} known for?|What is {x} famous for?|Why do people visit {x}?|What is the town of {x} proud of?|{x}'s speciality?
A {x} is known for its {y}.|People visit {x} for the {y}.|{x} is famous for its {y}.
R Which town is known for its {y}?
U These days {x} is known for its {y}.|{x} is famous for {y}, I was wrong before.
# town_mayor town full_name
S The mayor of {x} is {y}.|{x} elected {y} as mayor.|{y} governs {x}.|In {x} the town council is headed by {y}.|{y} won the local election in {x}.|The voters of {x} picked {y}.
Q Who is the mayor of {x}?|Who governs {x}?|Who won the election in {x}?|Who did the voters of {x} pick?|{x} mayor?
A The mayor of {x} is {y}.|{x} is governed by {y}.|{y} is the mayor of {x}.
R Where is {y} the mayor?|Which town is governed by {y}?
U After the election the mayor of {x} is {y}.|{x} has a new mayor, {y}.
# town_river town river
S {x} lies on {y}.|The river in {x} is called {y}.|{y} flows through {x}.|In {x} people swim in {y}.|The bridge in {x} crosses {y}.|{x} was flooded by {y} once.
Q Which river flows through {x}?|What is the river in {x} called?|Which water is {x} on?|What does the bridge in {x} cross?|{x} river?
A {x} lies on {y}.|The river in {x} is called {y}.|{y} flows through {x}.
R Which town lies on {y}?
U I looked at the map: {x} lies on {y}.|The river in {x} is {y} after all.
# town_distance town distance
S {x} is {y} from here.|It's {y} to {x}.|{y} separate us from {x}.|You have to go {y} to get to {x}.|The sign says {x} is {y} away.|I cycled the {y} to {x} once.
Q How far is {x}?|What is the distance to {x}?|How long is the way to {x}?|How many kilometres do I cycle to {x}?|{x}, how far?
A {x} is {y} from here.|It is {y} to {x}.|The distance to {x} is {y}.
R Which town is {y} away?
U By the new road {x} is {y} from here.|I measured: it's {y} to {x}.
# club_fee club price
S Membership in {x} costs {y}.|{x} charges {y} a year.|You pay {y} to join {x}.|{y} is the yearly fee of {x}.|The fee for {x} is {y} per person.|I transferred {y} to {x} for membership.
Q How much is membership in {x}?|What does {x} charge?|What do I pay to join {x}?|What is the fee of {x}?|{x} fee?
A Membership in {x} costs {y}.|{x} charges {y}.|The fee for {x} is {y}.
R Which club charges {y}?
U {x} raised the fee to {y}.|Membership in {x} is {y} now.
# club_room club spot_room
S {x} meets in {y}.|The sessions of {x} are in {y}.|{y} is where {x} gets together.|For {x} we use {y}.|They gave {y} to {x} for its evenings.|Come to {y} if you want to join {x}.
Q Where does {x} meet?|Which room does {x} use?|Where are the sessions of {x}?|Where do I go to join {x}?|{x}, which room?
A {x} meets in {y}.|{x} uses {y}.|The sessions of {x} are in {y}.
R Who meets in {y}?
U {x} meets in {y} from now on.|{x} had to move to {y}.
# course_teacher course full_name
S {x} is taught by {y}.|{y} teaches {x}.|The teacher of {x} is {y}.|In {x} we have {y} as instructor.|They found {y} to give {x}.|I like {x} because of {y}, the teacher.
Q Who teaches {x}?|Who is the instructor of {x}?|Who gives {x}?|Who stands in front in {x}?|{x} teacher?
A {x} is taught by {y}.|The teacher of {x} is {y}.|{y} teaches {x}.
R What does {y} teach?|Which course is given by {y}?
U {x} is taught by {y} this term.|{y} replaced the teacher of {x}.
# bill_amount bill price
S {x} is {y} a month.|We pay {y} for {x}.|{y} goes to {x} every month.|{x} came to {y} this time.|The monthly amount for {x} is {y}.|They take {y} from my account for {x}.
Q How much is {x}?|What do we pay for {x}?|What is the monthly amount for {x}?|How much do they take from my account for {x}?|{x}, how much?
A {x} is {y} a month.|You pay {y} for {x}.|The amount for {x} is {y}.
R What costs {y} a month?
U {x} went up to {y}.|From next month {x} is {y}.
# shop_manager shop full_name
S {x} belongs to {y}.|The owner of {x} is {y}.|{y} owns {x}.|{y} took over {x} from the parents.|Behind the counter of {x} you see {y}, the owner.|{x} is the business of {y}.
Q Who owns {x}?|Who does {x} belong to?|Who is behind the counter of {x}?|Whose business is {x}?|{x} owner?
A {x} belongs to {y}.|The owner of {x} is {y}.|{y} owns {x}.
R What does {y} own?
U {x} was sold to {y}.|The new owner of {x} is {y}.
# thing_size my_person size
S {x} wears clothes in {y}.|{x} takes {y} in shirts.|{y} is what fits {x}.|For {x} I buy jackets in {y}.|A sweater in {y} is right for {x}.|{x}'s clothing size is {y}.
Q What is {x}'s clothing size?|Which size of shirt does {x} need?|What fits {x}?|I want to order a jacket for {x}. Which one do I click?|{x} T-shirt size?
A {x} wears {y}.|{x} takes {y} in shirts.|{x}'s clothing size is {y}.
R Who wears clothes in {y}?
U {x} lost weight and wears {y} now.|{x} takes {y} these days.
# me_name me full_name
S My name is {y}.|I'm {y}.|{y} is my name.|People know me as {y}.|Hello, {y} here.|You can call me {y} if you like.
Q What is my name?|Who am I?|What am I called?|How should you address me?|My name?
A Your name is {y}.|You are {y}.|You told me your name is {y}.
R
U I changed my name to {y}.|Since the wedding my name is {y}.
# me_city me city
S I live in {y}.|My home is in {y}.|{y} is where I live.|I have an apartment in {y}.|I've been living in {y} for a couple of years.|We settled down in {y} and I like it here.
Q Where do I live?|Which city is my home?|What city am I in?|Where is my apartment?|Where's home for me?
A You live in {y}.|Your home is in {y}.|You told me that you live in {y}.
R
U I moved to {y}.|I live in {y} now.
# me_job me job
S I work as a {y}.|I'm a {y}.|My job: {y}.|As a {y} I get up early.|I make my living as a {y}.|I've been a {y} for ten years.
Q What do I do for a living?|What is my job?|What's my profession?|Which occupation do I have?|How do I earn my money?
A You work as a {y}.|You are a {y}.|Your job is {y}.
R
U I changed jobs and work as a {y} now.|I'm a {y} these days.
# me_age me age
S I'm {y} years old.|I am {y}.|I turned {y} last month.|At {y} I feel pretty fit.|My age is {y}.|I have been {y} since spring.
Q How old am I?|What is my age?|How many candles were on my cake?|What age did I say I was?|My age?
A You are {y} years old.|You are {y}.|Your age is {y}.
R
U It was my birthday, I'm {y} now.|I meant to say I'm {y}.
# me_birthday me date
S My birthday is on {y}.|I was born on {y}.|On {y} I celebrate my birthday.|{y} is my birthday.|I get presents on {y}.|I turn a year older on {y}, like my twin.
Q When is my birthday?|On which date was I born?|When do I celebrate?|When do people congratulate me?|My bday?
A Your birthday is on {y}.|You were born on {y}.|You celebrate on {y}.
R
U Typo, my birthday is {y}.|I meant {y} for my birthday.
# me_food me food
S My favourite food is {y}.|I love {y}.|{y} is what I could eat every day.|I never say no to {y}.|There's nothing I like to eat more than {y}.|I'd pick {y} over anything else on a menu.
Q What is my favourite food?|What do I like to eat?|Which dish makes me happy?|What should someone cook for me?|My fave meal?
A Your favourite food is {y}.|You love {y}.|You like to eat {y}.
R
U I prefer {y} now.|My new favourite food is {y}.
# me_colour me colour
S My favourite colour is {y}.|I like {y} best of all colours.|{y} is the colour I love.|I wear {y} whenever I can.|Give me anything {y} and I'm happy with the colour.|I'd paint my whole flat {y}.
Q What is my favourite colour?|Which colour do I like?|What shade do I prefer?|What would I paint my flat?|My colour?|If I bought a new sweater, how should it look?|What tone suits my taste?
A Your favourite colour is {y}.|You like {y} best.|You prefer {y}.
R
U I like {y} better now.|My favourite colour changed to {y}.
# me_employer me company
S I work for {y}.|I have a job at {y}.|{y} is my employer.|I was hired by {y} last year.|My office is at {y}.|They pay me well at {y}.
Q Who do I work for?|Where do I work?|What company am I at?|Who is my employer?|Who pays my salary?
A You work for {y}.|You have a job at {y}.|Your employer is {y}.
R
U I quit and work for {y} now.|I have a new employer, {y}.
# me_pet me animal
S I have a {y}.|I keep a {y} as a pet.|A {y} lives with me.|My pet is a {y}.|I got a {y} from the animal shelter.|My flat is small, but I share it with a {y}.
Q What pet do I have?|Which animal do I keep?|What kind of animal lives with me?|What did I get from the shelter?|My pet?
A You have a {y}.|Your pet is a {y}.|You keep a {y}.
R
U I gave it away and have a {y} now.|Now I have a {y} as a pet.
# me_petname me petname
S My pet is called {y}.|I named my pet {y}.|{y} is the name of my pet.|My pet listens to the name {y}.|I shout {y} and my pet comes.|The vet wrote {y} on my pet's card.
Q What is my pet called?|What did I name my pet?|What name does my pet listen to?|What do I shout to make my pet come?|Pet's name?
A Your pet is called {y}.|You named your pet {y}.|The name of your pet is {y}.
R
U I renamed my pet {y}.|My pet's name is {y} now.
# me_partner me first
S My partner's name is {y}.|I'm together with {y}.|{y} is my partner.|I share my life with {y}.|{y} and I have been a couple for years.|I got engaged to {y} in spring.
Q What is my partner's name?|Who am I together with?|Who is my better half?|Who am I in a relationship with?|My partner?
A Your partner's name is {y}.|You are together with {y}.|{y} is your partner.
R
U We broke up, my partner is {y} now.|I'm with {y} now.
# me_street me address
S My address is {y}.|I live at {y}.|{y} is my address.|Send my mail to {y}.|My house is at {y}.|My door is at {y}, with the green mailbox.
Q What is my address?|Where should mail be sent to me?|What street and number is my house?|Where would a courier find me?|My address?
A Your address is {y}.|You live at {y}.|Your house is at {y}.
R
U My new address is {y}.|I moved, I'm at {y} now.
# me_vehicle me vehicle
S I drive a {y}.|I own a {y}.|A {y} is what I drive to work.|I bought myself a {y}.|The {y} in the yard is mine.|I saved for years to get a {y}.
Q What do I drive?|What vehicle do I own?|How do I get to work?|What is parked in my garage?|My ride?|How am I getting around?|What's my means of transport?
A You drive a {y}.|You own a {y}.|You have a {y}.
R
U I sold it and drive a {y} now.|My new ride is a {y}.
# me_instrument me instrument
S I play the {y}.|I've played the {y} since I was a child.|The {y} is my instrument.|I practise the {y} every evening.|I take lessons on the {y}.|The neighbours hear me on the {y} a lot.
Q What instrument do I play?|What do I practise every evening?|Which musical instrument is mine?|What do the neighbours hear from me?|I play what?
A You play the {y}.|Your instrument is the {y}.|You practise the {y}.
R
U I switched to the {y}.|I play the {y} now instead.
# me_hobby me hobby
S My hobby is {y}.|I spend my weekends on {y}.|{y} is my great passion.|In my free time I enjoy {y}.|I got into {y} last year and can't stop.|After work I relax with some {y}.
Q What is my hobby?|What do I do in my free time?|How do I relax?|What am I passionate about?|My pastime?
A Your hobby is {y}.|You enjoy {y}.|In your free time you are into {y}.
R
U I have a new hobby, {y}.|I gave that up for {y}.
# me_boss me full_name
S My boss is {y}.|I report to {y}.|{y} is my manager.|At work, {y} tells me what to do.|My supervisor is called {y}.|I had my yearly talk with {y}, my boss.
Q Who is my boss?|Who do I report to?|What's my manager's name?|Who tells me what to do at work?|Boss's name?
A Your boss is {y}.|You report to {y}.|Your manager is {y}.
R
U I have a new boss, {y}.|{y} is my boss now.
# me_shoes me shoe_size
S My shoe size is {y}.|I wear shoes in size {y}.|{y} is my shoe size.|My feet need a {y}.|I take a {y} in boots.|In shoes I'm a {y}, or a bit more in winter.
Q What is my shoe size?|How big are my feet?|Which size do I wear on my feet?|What boots should I order, what number?|Shoe size?
A Your shoe size is {y}.|You wear shoes in size {y}.|You take a {y}.
R
U I measured, my shoe size is {y}.|My feet are a {y} now.
# me_wake me morning
S I get up at {y}.|My alarm is set to {y}.|At {y} I'm out of bed.|I wake up at {y} on workdays.|My day starts at {y}.|{y} is when my alarm goes off.
Q When do I get up?|What time is my alarm?|How early do I wake up?|When does my day start?|I'm up at?
A You get up at {y}.|Your alarm is set to {y}.|Your day starts at {y}.
R
U I get up at {y} now.|I set my alarm to {y}.
# me_learning me language
S I'm learning {y}.|I take {y} classes in the evening.|{y} is the language I'm learning.|I practise my {y} with an app.|I want to speak {y} by next year.|My {y} course is going well.
Q Which language am I learning?|What do I practise with the app?|What tongue do I want to speak by next year?|What are my evening classes in?|I'm learning what?|What am I studying after hours?|Which foreign vocabulary do I work on?
A You are learning {y}.|You take {y} classes.|The language you are learning is {y}.
R
U I dropped that and I'm learning {y}.|I switched to {y} classes.
# me_hometown me town
S I grew up in {y}.|I'm originally from {y}.|{y} is my home town.|I spent my childhood in {y}.|My parents raised me in {y}.|I was a kid in {y} before we left.
Q Where did I grow up?|Where am I from?|What is my home town?|Where did I go as a kid?|I'm from?
A You grew up in {y}.|You are from {y}.|Your home town is {y}.
R
U Actually I grew up in {y}.|To be exact, I'm from {y}.
# me_drink me drink
S I always drink {y}.|My drink is {y}.|{y} is what I drink in the morning.|I can't start the day without {y}.|I'll have {y}, as usual.|Order {y} for me, I never drink anything else.
Q What do I drink?|What's my usual drink?|What should you order for me at the bar?|Which beverage do I like?|My usual?
A You always drink {y}.|Your usual drink is {y}.|You like {y}.
R
U I only drink {y} now.|I switched to {y}.
# me_gym me day
S I go to the gym on {y}.|My workout is on {y}.|{y} is my gym day.|On {y} I lift weights.|I train every {y} after work.|You won't reach me on {y}, I'm working out.
Q When do I go to the gym?|Which day is my workout?|When do I lift weights?|On what day am I exercising?|Gym day?|When do I exercise?|When am I doing sports?
A You go to the gym on {y}.|Your workout is on {y}.|You train on {y}.
R
U I moved my workout to {y}.|I go to the gym on {y} now.
# me_dream_trip me country
S I have always wanted to see {y}.|My dream trip is {y}.|{y} is the country I dream of visiting.|One day I will travel to {y}.|I'm saving money for a journey to {y}.|A holiday in {y} is my big wish.
Q Where do I dream of travelling?|What's my dream trip?|Which country do I want to see?|What am I saving money for?|Dream destination?
A You dream of visiting {y}.|Your dream trip is {y}.|You want to see {y}.
R
U I'd rather see {y} now.|My dream destination is {y} now.
# me_laptop me brand
S My laptop is a {y}.|I use a laptop from {y}.|{y} made my laptop.|I bought a {y} laptop.|My computer is from {y}.|I'm typing this on my {y} laptop.
Q What laptop do I have?|Which brand is my computer?|Who made my laptop?|What am I typing on?|My laptop?
A Your laptop is from {y}.|You have a {y} laptop.|Your computer was made by {y}.
R
U I bought a new laptop, a {y}.|My laptop is now a {y}.
# me_locker me number3
S My locker is number {y}.|I use locker {y} at the pool.|{y} is my locker number.|My clothes are in locker {y}.|They gave me locker {y}.|Locker {y} is mine, the one by the window.
Q What is my locker number?|Where are my clothes at the pool?|Which locker is mine?|What number did they give me at the pool?|My locker?|Where did I store my stuff?|Where do I keep my towel and bag?
A Your locker is number {y}.|You use locker {y}.|Locker {y} is yours.
R
U I changed to locker {y}.|My new locker is {y}.
# me_neighbour me full_name
S My neighbour is called {y}.|{y} lives next door to me.|Next door to me lives {y}.|The person on the other side of my wall is {y}.|I share a fence with {y}.|{y} from next door waters my flowers.
Q What is my neighbour's name?|Who lives next door to me?|Who do I share a fence with?|Who waters my flowers?|Who's next door?|Who could feed my cat while I'm away, living closest?|Who has the house beside mine?
A Your neighbour is called {y}.|{y} lives next door to you.|Your neighbour is {y}.
R
U A new neighbour moved in next door, {y}.|My neighbour is {y} now.
# me_degree me subject
S I studied {y}.|I have a degree in {y}.|{y} is what I studied.|At university I did {y}.|My diploma says {y}.|I spent five years on {y} at college.
Q What did I study?|What is my degree in?|What did I do at university?|What does my diploma say?|My major?
A You studied {y}.|Your degree is in {y}.|You did {y} at university.
R
U I went back to university and studied {y}.|To be precise, my degree is in {y}.
# me_siblings me small
S I have {y} brothers and sisters.|I grew up with {y} siblings.|My parents had {y} more kids besides me.|There are {y} siblings in my family besides me.|With {y} siblings I never had my own room.|I'm close to all {y} of my siblings.
Q How many siblings do I have?|How many brothers and sisters have I got?|How many other kids did my parents have?|How large was my family growing up, how many siblings?|My siblings, how many?
A You have {y} siblings.|You have {y} brothers and sisters.|You grew up with {y} siblings.
R
U I found out about a half-brother, so I have {y} siblings.|Correct that to {y} siblings.
# me_sport me sport
S I play {y}.|I'm in a {y} club.|{y} is my sport.|On weekends I play {y} with friends.|My team won the local {y} cup.|I've played {y} since school.
Q What sport do I play?|What club am I in?|What do I play with friends on weekends?|In what did my team win the cup?|My sport?
A You play {y}.|Your sport is {y}.|You are in a {y} club.
R
U I play {y} now.|I changed my sport to {y}.
"""

_HELD_TEXT = """
# wifi_password place passphrase
S The Wi-Fi password at {x} is {y}.|To get online at {x}, enter {y}.|{y} is the wireless login at {x}.|Internet at {x} works with the words {y}.|Log in to the network of {x} with {y}, all lower case.|Wi-Fi {x}: {y}
Q What is the Wi-Fi password at {x}?|How do I get online at {x}?|What do I enter for internet at {x}?|My phone asks for a network key at {x}. What is it?|Wifi at {x}?
A The Wi-Fi password at {x} is {y}.|You get online at {x} with {y}.|Enter {y} for the network of {x}.
R Where does the password {y} work?
U They reset the Wi-Fi at {x}, the password is {y}.|New Wi-Fi password at {x}: {y}.
# parking car level
S This morning {x} got parked on {y}.|I left {x} in the multi-storey on {y}.|On {y} of the parking garage stands {x}.|{y}, that's where we parked {x} this morning.|Parking ticket for {x}: {y}.|We drove around forever and squeezed {x} in on {y}.
Q Where is {x} parked?|Which parking level is {x} on?|Where in the garage did I leave {x}?|How do I get back to {x}?|{x}, parked where?
A {x} is parked on {y}.|You left {x} on {y}.|You will find {x} on {y} of the garage.
R What is parked on {y}?
U I reparked {x}, it's on {y}.|Somebody moved {x} to {y}.
# seat my_person seat
S {x} sits in seat {y}.|Seat {y} is reserved for {x}.|The boarding pass of {x} shows {y}.|They assigned {y} to {x} on the plane.|{x} asked for the window and got {y}.|Check-in gave {x} row and letter {y}.
Q Which seat does {x} have?|Where does {x} sit on the plane?|What's on {x}'s boarding pass?|Which row is {x} in?|{x}'s seat?
A {x} has seat {y}.|{x} sits in {y}.|The boarding pass of {x} shows {y}.
R Who sits in seat {y}?
U {x} swapped seats and sits in {y}.|{x} was upgraded to {y}.
# gate flight gate
S {x} boards at gate {y}.|Gate {y} is where {x} boards.|The airport screen shows {y} for {x}.|Passengers for {x} walk to {y}.|{y} was announced for boarding {x}.|{x}: gate {y}, boarding soon
Q Which gate is {x}?|Where do we board {x}?|Where in the airport do I walk for {x}?|What does the screen show for {x}?|{x} gate?
A {x} boards at gate {y}.|The gate for {x} is {y}.|Walk to {y} for {x}.
R What boards at gate {y}?
U Gate change: {x} boards at {y}.|{x} was switched to gate {y}.
# allergy my_person allergen
S {x} has a strong allergy to {y}.|{x} gets a rash from {y}.|{y} gives {x} swollen eyes.|The allergy test of {x} was positive for {y}.|{x} must avoid {y} for medical reasons.|Contact with {y} sends {x} to hospital.
Q What is {x} allergic to?|What gives {x} a rash?|What must {x} avoid?|Is there anything {x}'s body does not tolerate?|{x} allergies?
A {x} is allergic to {y}.|{x} must avoid {y}.|{x} has an allergy to {y}.
R Who is allergic to {y}?|Who must avoid {y}?
U A new test shows {x} is allergic to {y}.|Wrong allergy: {x} reacts to {y}.
# gift_idea my_person object
S {x} wishes for a {y} at Christmas.|I plan to surprise {x} with a {y}.|A {y} is on {x}'s wish list.|For {x} I've hidden a wrapped {y}.|{x} hinted at wanting a {y} under the tree.|A {y} would be the perfect gift for {x}.
Q What is on {x}'s wish list?|What gift did I plan for {x}?|What does {x} want for Christmas?|What should I wrap for {x}?|Gift for {x}?
A {x} wishes for a {y}.|The gift for {x} is a {y}.|A {y} is on {x}'s wish list.
R Who wishes for a {y}?
U {x} wishes for a {y} instead.|New gift idea for {x}: a {y}.
# medication my_person medicine
S {x} takes {y} after meals.|The doctor prescribed {y} for {x}.|{y} was prescribed to {x}.|{x} needs {y} against the pain twice daily.|{x}'s pill box is full of {y}.|Pharmacy pickup for {x}: {y}.
Q Which medicine does {x} take?|What did the doctor prescribe for {x}?|What do I pick up at the pharmacy for {x}?|What treatment is {x} on?|{x}'s meds?
A {x} takes {y}.|The doctor prescribed {y} for {x}.|{x}'s medicine is {y}.
R Who takes {y}?
U The doctor put {x} on {y} instead.|{x}'s prescription is {y} now.
# blood_type person blood
S {x} has blood type {y}.|The donor card of {x} says {y}.|{y} runs in {x}'s veins, according to the lab.|{x} gave blood and is {y}.|{y} is {x}'s blood group.|Lab result {x}: {y}
Q What blood type is {x}?|Which blood group does {x} have?|What does {x}'s donor card say?|What must the hospital know before giving {x} a transfusion?|{x} blood?
A {x} has blood type {y}.|{x}'s blood group is {y}.|The donor card of {x} says {y}.
R Who has blood type {y}?
U The lab made an error: {x} is {y}.|Second test for {x}: blood type {y}.
# tattoo person wild_animal
S {x} has a tattoo of a {y}.|There's a {y} inked on {x}'s shoulder.|{x} got a {y} tattooed in Bali.|A {y} decorates {x}'s skin.|Under the sleeve, {x} hides an inked {y}.|{x} let an artist ink a {y} on one arm.
Q What tattoo does {x} have?|What is inked on {x}?|What animal is on {x}'s skin?|What does {x} hide under the sleeve?|{x}'s ink?
A {x} has a tattoo of a {y}.|A {y} is inked on {x}'s skin.|{x}'s tattoo shows a {y}.
R Who has a tattoo of a {y}?
U {x} had it covered with a tattoo of a {y}.|Looking closer, {x}'s tattoo is a {y}.
# broken_bone my_person bone
S {x} fell and hurt the {y}.|{x} fractured the {y} while skiing.|Doctors put the {y} of {x} in plaster.|An X-ray of the {y} was taken for {x}.|Poor {x} slipped on ice and injured the {y}.|Surgeons operated on the {y} of {x}.
Q What did {x} injure?|What is in plaster on {x}?|Which body part did {x} hurt?|Where was the surgery on {x}?|{x} hurt what?
A {x} hurt the {y}.|{x} injured the {y}.|The {y} is what {x} fractured.
R Who injured the {y}?
U It wasn't that; {x} fractured the {y}.|The X-ray shows that {x} injured the {y}.
# pizza_topping my_person topping
S {x} wants pizza with {y}.|Extra {y} on the pizza of {x}.|{y} must be on {x}'s pizza.|{x} always adds {y} as a topping.|At the pizzeria {x} asks for extra {y}.|A pizza without {y} gets sent back by {x}.
Q Which topping does {x} want?|What goes on {x}'s pizza?|What extra does {x} ask for at the pizzeria?|I'm ordering from the Italian place. What do I add for {x}?|{x}'s pizza?
A {x} wants {y} on pizza.|{x}'s topping is {y}.|You can order a pizza with {y} for {x}.
R Who wants {y} on pizza?
U {x} wants {y} on pizza from now on.|New topping for {x}: {y}.
# costume my_person costume
S {x} is dressing up as a {y} for Halloween.|{x} made a {y} costume.|A {y} costume was sewn for {x}.|At carnival {x} goes as a {y}.|You'll recognise {x}, dressed like a {y}.|{x} rented a {y} outfit for the masked ball.
Q What is {x} dressing up as?|What costume does {x} have?|What will {x} be at carnival?|How will {x} look at the masked ball?|{x}, Halloween?
A {x} is dressing up as a {y}.|{x} has a {y} costume.|{x} goes as a {y}.
R Who is dressing up as a {y}?
U {x} decided to dress up as a {y} instead.|{x} swapped costumes and goes as a {y}.
# licence_plate car plate
S The licence plate of {x} is {y}.|{x} has the registration {y}.|Stamped on the bumper of {x} you can read {y} in black letters.|Police noted {y} as the plate of {x}.|For the ferry booking, {x} has plate {y}.|Toll registration: {x}, {y}
Q What is the licence plate of {x}?|Which registration does {x} have?|What letters and digits are on the bumper of {x}?|What plate do I give for {x} on the ferry?|{x} plate?
A The licence plate of {x} is {y}.|{x} has the registration {y}.|The plate of {x} says {y}.
R Which car has the plate {y}?
U {x} got new plates: {y}.|{x} was re-registered as {y}.
# cargo ship cargo
S {x} is carrying {y}.|{x} sailed with a load of {y}.|{y} fills the hold of {x}.|Dockers loaded {y} onto {x}.|A shipment of {y} travels aboard {x}.|Freight list of {x}: {y}
Q What is {x} carrying?|What load is aboard {x}?|What did the dockers put on {x}?|What fills the hold of {x}?|{x} cargo?
A {x} is carrying {y}.|The cargo of {x} is {y}.|{x} has a load of {y}.
R Which ship is carrying {y}?
U {x} unloaded and carries {y} this time.|New freight on {x}: {y}.
# crop farm crop
S They harvest {y} on {x}.|{x} produces mostly {y}.|{y} is sown on {x} each season.|A combine was bringing in {y} on {x}.|Tons of {y} get harvested on {x}.|{x} went over to farming {y}.
Q What do they harvest on {x}?|Which crop is sown on {x}?|What is farmed on {x}?|What does the combine bring in on {x}?|{x} crop?
A They harvest {y} on {x}.|The crop on {x} is {y}.|{x} produces {y}.
R Where do they harvest {y}?
U The crop on {x} was switched to {y}.|Next season they sow {y} on {x}.
# parcel_content parcel object
S There's a {y} inside {x}.|{x} contains a {y}.|A {y} was packed into {x}.|I unwrapped {x} and found a {y}.|Customs says {x} has a {y} inside.|Somebody packed a {y} in {x}, with lots of foam.
Q What is inside {x}?|What does {x} contain?|What was packed into {x}?|What will I find when I unwrap {x}?|{x}, what's in it?
A There is a {y} inside {x}.|{x} contains a {y}.|You will find a {y} in {x}.
R Which parcel contains a {y}?
U I opened {x}: it contains a {y}.|Wrong label, {x} contains a {y}.
# star_sign person zodiac
S {x}'s star sign is {y}.|Going by the horoscope, {x} counts as {y}.|{y} is {x}'s sign of the zodiac.|{x} believes in astrology and reads the {y} column.|{x} says that being {y} explains everything.|In astrology they list {x} under {y}.
Q What is {x}'s star sign?|Which zodiac sign is {x}?|Whose horoscope column does {x} read, which sign?|What is {x} in astrology?|{x}'s sign?
A {x}'s star sign is {y}.|{x} is {y}.|{x}'s zodiac sign is {y}.
R Whose star sign is {y}?
U By the exact hour, {x}'s star sign is {y}.|Wrong sign: {x} is {y}.
# prize person prize
S {x} won {y} in a raffle.|The jury awarded {x} {y}.|First prize went to {x}: {y}.|{y} was handed to {x} on stage.|{x} entered a lottery and won {y}.|As winner {x} received {y} and some applause.
Q What did {x} win?|Which prize went to {x}?|What was {x} awarded?|What did the jury hand to {x}?|{x} won what?
A {x} won {y}.|The prize for {x} was {y}.|{x} was awarded {y}.
R Who won {y}?
U The jury corrected itself: {x} won {y}.|{x} traded the prize for {y}.
# room_fault room fault
S There's {y} to report in {x}.|The tenant complained about {y} in {x}.|{x} suffers from {y}.|{y} was discovered by tenants of {x}.|A handyman should come because {x} has {y}.|Maintenance ticket for {x}: {y}, urgent
Q What did the tenant complain about in {x}?|What needs fixing in {x}?|Why should a handyman come to {x}?|What was discovered in {x}?|{x} issue?
A The complaint about {x} is {y}.|{x} has {y}.|A handyman should look at {x} because of {y}.
R Where was {y} discovered?
U Other complaint for {x}: {y}.|That was dealt with, and the tenant reports {y} in {x}.
# hotel_room my_person number3
S {x} stays in hotel room {y}.|Reception put {x} into {y}.|Room {y} was booked for {x}.|{x} checked in and sleeps in {y} tonight.|Deliver the breakfast tray for {x} to {y}.|The key card of {x} opens {y}.
Q Which hotel room is {x} in?|Where did reception put {x}?|Which door do I knock on at the hotel for {x}?|Where does the breakfast tray for {x} go?|{x}'s room no?
A {x} is in room {y}.|{x} stays in hotel room {y}.|Reception put {x} into {y}.
R Who stays in hotel room {y}?
U {x} complained and was given room {y}.|{x} changed hotel rooms to {y}.
# me_dentist me day
S I have a dentist appointment on {y}.|My dental check-up is this {y}.|{y} I'm getting my teeth cleaned.|The dentist is expecting me on {y}.|My filling is scheduled for {y} and I'm nervous.|This {y} a tooth of mine gets pulled.
Q When is my dentist appointment?|When do I get my teeth cleaned?|Which day is my filling scheduled?|When must I be in the dental chair?|Dentist, when?
A Your dentist appointment is on {y}.|The dentist expects you on {y}.|Your dental check-up is on {y}.
R
U The dentist called and rescheduled me to {y}.|My dentist appointment was pushed to {y}.
# me_lucky_number me number2
S For luck I choose {y}.|I always bet on {y}.|{y} brings me luck.|In roulette I put everything on {y}.|I'm superstitious about {y}, it never failed me.|I trust in {y} when I gamble.
Q What is my lucky number?|What do I bet on?|Which number brings me luck?|Where do I put my chips?|Lucky number?
A Your lucky number is {y}.|You always bet on {y}.|{y} brings you luck.
R
U I lost too often; my lucky number is {y} from today.|My lucky number is {y} now.
# me_username me username
S Online my username reads {y}.|I post online as {y}.|{y} is my screen name on the forum.|I registered my account as {y}.|Search for {y} and you'll find my profile.|Gamers know me under {y}.
Q What is my username?|How am I registered on the forum?|What's my screen name?|What must people search to find my profile?|My handle?
A Your username is {y}.|You post as {y}.|Your screen name is {y}.
R
U I changed my username to {y}.|My account was renamed {y}.
# me_bank me bank
S My savings are with {y}.|I opened an account at {y}.|{y} manages my money.|I took out a mortgage with {y}.|{y} issued my credit card.|My bank statements arrive from {y}.
Q Which bank am I with?|Where are my savings?|Who issued my credit card?|Who gave me the mortgage?|My bank?
A Your bank is {y}.|Your savings are with {y}.|You have an account at {y}.
R
U I closed that account and am with {y}.|I transferred my savings to {y}.
# me_dream me wild_animal
S Last night I dreamed about a {y}.|A {y} appeared in my dream.|In my sleep a {y} chased me.|I had a nightmare with a {y} in it.|I woke up sweating from a dream of a {y}.|In last night's dream I talked to a {y}.
Q What did I dream about?|What appeared in my nightmare?|What chased me in my sleep?|Why did I wake up sweating?|My dream?|What did I see at night with closed eyes?|What scared me in bed?
A You dreamed about a {y}.|A {y} appeared in your dream.|You had a dream with a {y} in it.
R
U Thinking about it, the dream was about a {y}.|Another night, another dream: this time a {y}.
# me_resolution me hobby
S My New Year's resolution is to try {y}.|I promised myself more {y} this year.|{y} is my goal since January.|I vowed to do {y} regularly.|I made a bet that I'd keep up {y} until December.|{y} is on my list of good intentions.
Q What is my New Year's resolution?|What did I promise myself?|What did I vow to do?|What's on my list of good intentions?|My resolution?
A Your resolution is {y}.|You promised yourself more {y}.|You vowed to do {y}.
R
U I changed my resolution to {y}.|My new goal is {y}.
"""


def _parse_relations(text):
    out = []
    for block in text.strip().split("\n# "):
        head, *lines = block.lstrip("# ").split("\n")
        id_, subject, value = head.split()
        f = {line[0]: tuple(t.strip() for t in line[1:].split("|") if t.strip()) for line in lines if line}
        out.append(Relation(id_, subject, value, f["S"], f["Q"], f["A"], f.get("R", ()), f["U"]))
    return tuple(out)


TRAIN = _parse_relations(_TRAIN_TEXT)
HELD = _parse_relations(_HELD_TEXT)

# ---------------------------------------------------------------- conversation text

STATE_PREFIXES = (
    "",
    "",
    "",
    "Please remember this.",
    "Note:",
    "By the way,",
    "Just so you know,",
    "Remember:",
    "FYI,",
    "For later:",
    "Keep this in mind.",
    "I want to tell you something.",
    "Here is something for you to remember.",
    "One more thing.",
    "Also,",
    "Oh, and",
    "So,",
    "Quick note:",
    "Please note the following.",
    "Before I forget,",
    "You should know this.",
    "Let me tell you something.",
    "A small fact:",
    "Can you store this for me?",
    "Memo:",
    "I forgot to mention this.",
    "Please keep a note.",
    "Something new:",
    "Well,",
    "Don't forget this.",
    "Save this for later.",
    "Information for you:",
)
ACKS = (
    "I will remember it.",
    "Noted.",
    "Okay.",
    "Got it.",
    "Thanks, I'll remember that.",
    "Understood.",
    "All right.",
    "Sure, I'll keep it in mind.",
    "Good to know.",
    "Thank you for telling me.",
    "I've made a note of that.",
    "Okay, noted.",
    "I'll keep that in mind.",
    "Fine, I will remember that.",
    "Thanks for letting me know.",
    "Of course.",
    "Alright, got it.",
    "Okay, I will not forget it.",
    "That is noted.",
    "Sure.",
    "Thanks for the information.",
    "Right, I have it.",
    "I see.",
    "Okay, thanks.",
    "Very well, I'll remember.",
    "Will do.",
    "Great, thanks for sharing.",
)
UNKNOWN = (
    "I don't know; you haven't told me that.",
    "You haven't told me that yet.",
    "I don't know.",
    "I'm not sure, you never mentioned it.",
    "I have no information about that.",
    "Sorry, I don't know that.",
    "You didn't mention that to me.",
    "I can't say, because you haven't told me.",
    "That is something you haven't told me.",
    "I don't have that information.",
    "Sorry, you have not shared that with me.",
    "I don't remember you telling me that.",
    "I have no note about that.",
    "No idea, I was never told.",
)


def _pairs(text):
    return tuple(tuple(s.strip() for s in line.split("|")) for line in text.strip().split("\n"))


SMALLTALK = _pairs("""
Hi!|Hello! How can I help you?
How are you today?|I'm doing well, thank you. How are you?
Good morning.|Good morning! What can I do for you?
Good evening.|Good evening! How was your day?
Thanks a lot.|You're welcome!
Can you help me with something?|Of course. What do you need?
Tell me a joke.|Why did the math book look sad? It had too many problems.
It's raining again.|That's a pity. Maybe it is a good day to stay inside.
I'm bored.|You could take a short walk or read something interesting.
What is two plus two?|Two plus two is four.
What's the capital of France?|The capital of France is Paris.
How many days are in a week?|There are seven days in a week.
I'm tired.|Maybe you should take a short break.
What a day!|It sounds like it was a busy one.
Do you like music?|I don't listen to music, but I can talk about it.
Are you a human?|No, I'm an AI assistant.
What can you do?|I can answer questions, help with texts and talk with you.
That's funny.|I'm glad you like it.
I don't understand.|No problem, I can explain it in another way.
Never mind.|All right. Let me know if you need anything.
Wait a second.|Sure, take your time.
I'm back.|Welcome back! What shall we do next?
Let's change the topic.|Sure. What would you like to talk about?
The weather is nice today.|That's great. Enjoy the sunshine!
It's cold outside.|Then put on something warm.
How do I boil an egg?|Put it in boiling water for about eight minutes.
Why is the sky blue?|Because air scatters blue light more than red light.
How many legs does a spider have?|A spider has eight legs.
What's the opposite of hot?|The opposite of hot is cold.
Give me a word that rhymes with cat.|Hat rhymes with cat.
I slept badly.|I'm sorry to hear that. Maybe you can rest a little later.
I'm a bit hungry.|Perhaps it is time for a snack.
Do you ever sleep?|No, I don't need sleep.
Wish me luck!|Good luck! I'm sure you will do well.
I finished my work.|Well done! Now you can relax.
What is water made of?|Water is made of hydrogen and oxygen.
How do you spell necessary?|It is spelled n-e-c-e-s-s-a-r-y.
Is a tomato a fruit?|In botany, a tomato is a fruit.
Say something nice.|You are doing better than you think.
Can you count to five?|One, two, three, four, five.
I had a long meeting.|I hope at least it was useful.
Traffic was terrible.|That can be annoying. I'm glad you made it.
What is the largest ocean?|The Pacific Ocean is the largest.
Any tips for staying focused?|Work in short blocks and put your phone away.
I can't decide.|Try writing down the pros and cons.
Sorry for the wait.|No problem at all.
You are very helpful.|Thank you, that's kind of you.
Hmm.|Is there something you want to ask?
Okay, let me think.|Take all the time you need.
Who wrote Hamlet?|Hamlet was written by William Shakespeare.
How many minutes are in an hour?|There are sixty minutes in an hour.
Do fish sleep?|Yes, most fish rest, although they have no eyelids.
What does ASAP mean?|It means as soon as possible.
I like talking to you.|Thank you, I enjoy helping you.
It's getting late.|Then maybe it is time to rest.
Happy weekend!|Thank you, I hope you have a good one too.
I burned my dinner.|Oh no! It happens to everyone.
Can plants grow without light?|Most plants need light to grow well.
Is it healthy to drink water?|Yes, drinking enough water is important.
I need a break.|That's fair. A few minutes away from the screen can help.
See you later.|See you later!
What is a synonym for big?|Large is a synonym for big.
""")

# ---------------------------------------------------------------- passages: 'P text' with {slot} or {pool_2}; then 'slot: q|q|q => a|a' or 'slot @macro'

_MACROS = {
    "name": "What is my name?|What am I called?|Who am I? => Your name is {*}.|You are called {*}.",
    "city": "Where do I live?|Which city is my home?|What place am I living in? => You live in {*}.|Your home is in {*}.",
    "job": "What is my job?|What do I do for a living?|What's my profession? => You work as a {*}.|You are a {*}.",
    "firm": "Who do I work for?|What is my employer called?|Which company am I at? => You work for {*}.|Your employer is {*}.",
    "boss": "Who is my boss?|What is my manager called?|Who do I report to? => Your boss is {*}.|Your manager is called {*}.",
    "petname": "What is my pet called?|What's the name of our animal?|What did we name our pet? => Your pet is called {*}.|The animal's name is {*}.",
    "animal": "What kind of pet do I have?|Which animal lives with me?|What animal do I keep? => You have a {*}.|Your pet is a {*}.",
    "sister": "What is my sister's name?|What's my sister called?|Who is my sister? => Your sister is called {*}.|Your sister's name is {*}.",
    "brother": "What is my brother's name?|What's my brother called?|Who is my brother? => Your brother is called {*}.|Your brother's name is {*}.",
    "son": "What is my son's name?|What is my boy called?|Who is my son? => Your son is called {*}.|Your son's name is {*}.",
    "daughter": "What is my daughter's name?|What is my girl called?|Who is my daughter? => Your daughter is called {*}.|Your daughter's name is {*}.",
    "wife": "What is my wife's name?|Who am I married to?|What's my spouse called? => Your wife is called {*}.|You are married to {*}.",
    "husband": "What is my husband's name?|Who am I married to?|What's my spouse called? => Your husband is called {*}.|You are married to {*}.",
    "friend": "What is my friend's name?|Which friend did I mention?|Who is the friend I talked about? => Your friend is called {*}.|You mentioned your friend {*}.",
    "hobby": "What is my hobby?|What do I do for fun?|How do I spend my free time? => Your hobby is {*}.|You enjoy {*}.",
    "food": "What do I like to eat?|What is my favourite food?|Which dish do I love? => You love {*}.|Your favourite food is {*}.",
    "from": "Where did I grow up?|Where am I from?|What's my home town? => You grew up in {*}.|You come from {*}.",
    "age": "How old am I?|What is my age?|What age did I mention for myself? => You are {*} years old.|You are {*}.",
    "instrument": "What instrument do I play?|What music do I make?|What do I practise? => You play the {*}.|Your instrument is the {*}.",
    "lang": "Which language am I learning?|What do I take classes in?|What tongue do I want to speak? => You are learning {*}.|The language is {*}.",
    "study": "What do I study?|What is my major?|What is my degree in? => You study {*}.|Your subject is {*}.",
}

_PASSAGES_TRAIN_TEXT = """
P I'm {first}, I moved to {city} last {month} with my brother {mname} and our {animal} {petname}.
first @name
city @city
month: When did I move?|In which month did I change homes?|When did I come to my new city? => You moved in {month}.|It was in {month}.
mname @brother
petname @petname
P My name is {first} and I'm a {job}. I live in {city} with my wife {fname}, and on weekends I do a lot of {hobby}.
first @name
job @job
city @city
fname @wife
hobby @hobby
P We just got a {animal} and the kids named it {petname}. My son {mname} feeds it in the morning and my daughter {fname} in the evening.
animal @animal
petname @petname
mname @son
fname @daughter
P I started at {company} in {month}. My boss is {full_name}, and I share an office with {first}, who is from {country}.
company @firm
month: When did I start my job?|In which month did I begin at work?|Since when am I employed? => You started in {month}.|It was in {month}.
full_name @boss
first: Who do I share an office with?|Who sits in the same room at work?|What's my office mate called? => You share an office with {first}.|It is {first}.
country: Where is my office mate from?|Which country does {first} come from?|What is {first}'s home country? => {first} is from {country}.|Your office mate comes from {country}.
P I grew up in {town}, where my father was a {job} and my mother a {job_2}. These days I live in {city}.
town @from
job: What was my father's job?|What did my dad do for a living?|My father's profession? => Your father was a {job}.|He was a {job}.
job_2: What was my mother's job?|What did my mum do for a living?|My mother's profession? => Your mother was a {job_2}.|She was a {job_2}.
city @city
P I'm {age}, I study {subject}, and to pay the rent I work at night in a bar in {city}. My flatmate {first} plays the {instrument}, so I sleep badly.
age @age
subject @study
city: Where is the bar I work in?|In which city do I work at night?|Where do I earn my rent? => The bar is in {city}.|You work in {city}.
first: Who is my flatmate?|What is my flatmate's name?|Who do I live with? => Your flatmate is {first}.|You live with {first}.
instrument: What does my flatmate play?|Which instrument keeps me awake?|Why do I sleep badly? => Your flatmate plays the {instrument}.|It is the {instrument}.
P Last night my sister {fname} cooked {food} for everyone. She's a {job} in {city} and only visits in {month}.
fname @sister
food: What did my sister cook?|What did we eat last night?|Which dish did {fname} make? => She cooked {food}.|You had {food}.
job: What does my sister do for work?|What is {fname}'s job?|My sister's profession? => {fname} is a {job}.|Your sister works as a {job}.
city: Where does my sister work?|In which city is {fname}?|Where is my sister based? => She works in {city}.|{fname} is in {city}.
P I bought a {vehicle} for {bigprice} from a guy called {first}. It's already at the garage on {street}.
vehicle: What did I buy?|Which vehicle do I have now?|What is at the garage? => You bought a {vehicle}.|It is a {vehicle}.
bigprice: How much did I pay?|What was the price of my vehicle?|How expensive was it? => You paid {bigprice}.|It cost {bigprice}.
first: Who sold it to me?|From whom did I buy it?|What's the seller's name? => {first} sold it to you.|The seller was {first}.
street: Where is the garage?|On which street is it being repaired?|Where is my vehicle now? => The garage is on {street}.|It is on {street}.
P My husband {mname} and I met in {city} in {year}. He's crazy about {sport}; I prefer {hobby}.
mname @husband
city: Where did I meet my husband?|In which city did we get to know each other?|Where did {mname} and I meet? => You met in {city}.|It was in {city}.
year: When did I meet my husband?|In which year did we meet?|Since when do I know {mname}? => You met in {year}.|It was in {year}.
sport: What sport does my husband like?|What is {mname} crazy about?|What does he love to watch or play? => He is crazy about {sport}.|{mname} loves {sport}.
hobby @hobby
P Our house is at {address}. The kitchen is {colour}, the bathroom {colour_2}, and in the garden we grow {plant}.
address: What is my address?|Where is our house?|Where would a courier bring my mail? => Your house is at {address}.|Your address is {address}.
colour: What colour is the kitchen?|How is our kitchen painted?|Which paint is in the kitchen? => The kitchen is {colour}.|It is {colour}.
colour_2: What colour is the bathroom?|How is our bathroom painted?|Which paint is in the bathroom? => The bathroom is {colour_2}.|It is {colour_2}.
plant: What grows in our garden?|What do we grow?|What did we plant outside? => You grow {plant}.|There are {plant} in your garden.
P Every {day} I have {language} class with {full_name}, and on {day_2} I go to {hobby}. The rest of the week I'm free.
day: When is my language class?|On which day do I study a language?|When do I see my teacher? => Your class is on {day}.|It is on {day}.
language @lang
full_name: Who is my teacher?|Who gives my class?|What's my teacher's name? => Your teacher is {full_name}.|It is {full_name}.
day_2: When do I do {hobby}?|Which day is for my hobby?|On what day do I have {hobby}? => You do it on {day_2}.|{day_2} is the day for {hobby}.
P I'm a {job} at {company}, {number2} minutes from my flat by bus. Lunch is usually {food}, and I'm home by {evening}.
job @job
company @firm
number2: How long is my bus ride?|How many minutes to work?|How far is my flat from work? => It takes {number2} minutes.|It is {number2} minutes by bus.
food: What do I eat for lunch?|What's my usual lunch?|What do I have at noon? => You usually have {food}.|Your lunch is {food}.
evening: When am I home?|What time do I come back?|By when am I back from work? => You are home by {evening}.|You come back by {evening}.
P My grandmother {fname} turned {age} in {month}. She still speaks {language} and bakes {food} on Sundays.
fname: What is my grandmother's name?|What's grandma called?|Who is my grandmother? => Your grandmother is called {fname}.|Her name is {fname}.
age: How old is my grandmother?|What age did {fname} reach?|Grandma's age? => She is {age}.|Your grandmother is {age} years old.
month: When is my grandmother's birthday month?|In which month did {fname} turn {age}?|When did grandma have her birthday? => It was in {month}.|Her birthday was in {month}.
language: What language does my grandmother speak?|Which tongue does {fname} still know?|In what language can I talk to grandma? => She speaks {language}.|{fname} speaks {language}.
P I play the {instrument} in a {genre} band with {first} and {first_2}. We rehearse on {day} in a cellar on {street}.
instrument @instrument
genre: What kind of band am I in?|What style of music do we play?|Which genre is our band? => You play {genre}.|It is a {genre} band.
day: When do we rehearse?|Which day is band practice?|When does the band meet? => You rehearse on {day}.|Practice is on {day}.
street: Where do we rehearse?|On which street is the cellar?|Where is band practice? => You rehearse on {street}.|The cellar is on {street}.
P My dog is a {breed} called {petname}, {petage} years old, and the vet {full_name} says he's too fat. He steals {petfood} from the table.
breed: What breed is my dog?|Which kind of dog do I have?|What sort of dog is {petname}? => Your dog is a {breed}.|{petname} is a {breed}.
petname: What is my dog called?|What's my dog's name?|How do I call my dog? => Your dog is called {petname}.|His name is {petname}.
petage: How old is my dog?|What age is {petname}?|How many years has my dog lived? => He is {petage} years old.|{petname} is {petage}.
full_name: Who is my vet?|Who examined {petname}?|Who says my dog is too fat? => The vet is {full_name}.|It is {full_name}.
petfood: What does my dog steal?|What disappears from the table?|What does {petname} take? => He steals {petfood}.|{petname} takes {petfood}.
P I lost my {portable} on the train to {city}. Luckily a {job} named {first} found it and gave it to me on {day}.
portable: What did I lose?|What was found by {first}?|What did I leave on the train? => You lost your {portable}.|It was your {portable}.
city: Where was the train going?|What was the destination of my train?|To which city did I travel? => The train was going to {city}.|It went to {city}.
first: Who found my things?|What's the name of the honest finder?|Who gave it back to me? => {first} found it.|The finder was {first}.
day: When did I get it back?|On which day was it returned?|When did {first} give it to me? => You got it back on {day}.|It was on {day}.
P Hey, {first} here. Back from {country} since {day}, brought a {portable} for my friend {first_2} and a cold for myself.
first @name
country: Where was I travelling?|Which country did I come back from?|Where did I spend my trip? => You were in {country}.|You came back from {country}.
portable: What did I bring for my friend?|What is {first_2} getting from me?|What souvenir did I bring? => You brought a {portable}.|It is a {portable}.
first_2 @friend
P The company picnic is on {date} at {venue}. I'm in charge of the {drink}, and {full_name} from sales brings {food}.
date: When is the company picnic?|On which date do we have the picnic?|When do we eat outside with work? => The picnic is on {date}.|It is on {date}.
venue: Where is the company picnic?|What's the place for the picnic?|Where do I go on that day? => The picnic is at {venue}.|It is at {venue}.
drink: What am I in charge of?|What do I have to bring?|What is my task for the picnic? => You are in charge of the {drink}.|You bring the {drink}.
food: What does {full_name} bring?|What food will there be?|What comes from the sales team? => {full_name} brings {food}.|There will be {food}.
P I take the {time} train from {town} and change in {city}. My seat mate is usually {full_name}, who collects {collectable}.
time: Which train do I take?|When does my train leave?|At what time do I travel? => You take the {time} train.|Your train leaves at {time}.
town: Where do I get on the train?|From which town do I leave?|Where does my ride begin? => You start in {town}.|You get on in {town}.
city: Where do I change trains?|In which city do I switch?|Where do I have to get off and change? => You change in {city}.|It is {city}.
collectable: What does my seat mate collect?|What does {full_name} collect?|What is my train friend's collection? => {full_name} collects {collectable}.|It is {collectable}.
P As a kid I wanted to be a {job}, but I ended up as a {job_2}. My brother {mname} did the opposite and moved to {city}.
job: What did I want to be as a kid?|What was my dream job?|Which career did I dream of? => You wanted to be a {job}.|Your dream job was {job}.
job_2: What did I end up as?|What is my job now?|What do I really do for a living? => You ended up as a {job_2}.|You are a {job_2}.
mname @brother
city: Where did my brother move?|In which city is {mname}?|Where does my brother live? => He moved to {city}.|{mname} is in {city}.
P Our landlord {full_name} wants {price} more rent from {month}. We may move to {town}, where my aunt {fname} has a free room.
full_name: Who is our landlord?|What's the landlord's name?|Who wants more rent? => Your landlord is {full_name}.|It is {full_name}.
price: How much more rent do they want?|What is the rent increase?|How much extra do we pay? => The increase is {price}.|You pay {price} more.
month: When does the rent go up?|From when is it more expensive?|In which month does it change? => It goes up in {month}.|From {month} on.
town: Where may we move?|Where is the free room?|Which town could be our next home? => You may move to {town}.|The room is in {town}.
fname: What is my aunt's name?|Who has a free room?|What is my aunt called? => Your aunt is called {fname}.|It is your aunt {fname}.
P I drink {drink} in the morning and {drink_2} at night. My doctor, {full_name}, told me to stop both by {month}.
drink: What do I drink in the morning?|What's my morning drink?|What do I have after getting up? => You drink {drink}.|It is {drink}.
drink_2: What do I drink at night?|What's my evening drink?|What do I have before bed? => You drink {drink_2}.|It is {drink_2}.
full_name: Who is my doctor?|Who told me to stop?|What is my doctor's name? => Your doctor is {full_name}.|It was {full_name}.
month: By when should I stop?|What month did the doctor set?|Until when may I go on? => You should stop by {month}.|By {month}.
P {first} speaking. I run a small shop for {product} on {street}, open since {year}, and my cousin {first_2} does the accounts.
first @name
product: What does my shop sell?|What kind of shop do I run?|What can people buy from me? => You sell {product}.|Your shop sells {product}.
street: Where is my shop?|On which street is my business?|Where do customers find me? => Your shop is on {street}.|It is on {street}.
year: Since when is my shop open?|When did I open?|In which year did my business start? => It has been open since {year}.|You opened in {year}.
first_2: Who does my accounts?|What's my cousin's name?|Who handles the money in my shop? => Your cousin {first_2} does.|It is {first_2}.
P My twins {fname} and {mname} are {petage}. She loves {sport}, he is afraid of {fear}.
fname @daughter
mname @son
petage: How old are my twins?|What age are my kids?|My children's age? => They are {petage}.|Your twins are {petage} years old.
sport: What does my daughter love?|Which sport does {fname} like?|What does {fname} play? => She loves {sport}.|{fname} likes {sport}.
fear: What is my son afraid of?|What scares {mname}?|What frightens my boy? => He is afraid of {fear}.|{mname} fears {fear}.
P I moved out of {city} because it was too loud. Now I rent a cottage in {town} for {price} a week and write a book about {topic}.
city: Where did I live before?|Which city was too loud?|What place did I leave? => You lived in {city}.|You left {city}.
town: Where is my cottage?|Where do I live now?|Which town did I move to? => Your cottage is in {town}.|You live in {town} now.
price: How much is my rent?|What do I pay a week?|What does the cottage cost? => You pay {price} a week.|It is {price}.
topic: What is my book about?|What do I write about?|Which topic am I working on? => Your book is about {topic}.|You write about {topic}.
P On {date} I'm flying to {country} with {first}. The flight leaves at {time} and the hotel is on {street}.
date: When do I fly?|What is the date of my trip?|When do I leave the country? => You fly on {date}.|It is on {date}.
country: Where am I flying?|Which country is my trip to?|What's my destination? => You are flying to {country}.|Your destination is {country}.
first: Who comes with me?|Who is my travel companion?|With whom am I flying? => {first} comes with you.|You travel with {first}.
time: What time is my flight?|When does the plane take off?|At what hour do I leave? => It leaves at {time}.|Your flight is at {time}.
street: Where is the hotel?|On which street do we stay?|What street will we sleep on? => The hotel is on {street}.|You stay on {street}.
P Bad week: the {object} broke, my {animal} ran away and {full_name} beat me at {sport}.
object: What broke?|Which of my things is damaged?|What needs a repair? => The {object} broke.|It was the {object}.
animal: Which animal ran away?|What pet is missing?|What did I lose this week? => Your {animal} ran away.|Your {animal} is missing.
full_name: Who beat me?|Who did I lose to?|Who won against me? => {full_name} beat you.|You lost to {full_name}.
sport: What did I lose at?|In which sport was I beaten?|What did we play? => You lost at {sport}.|It was {sport}.
P I teach {subject} at a school in {town}. My best pupil, {full_name}, wants to become a {job}.
subject: What do I teach?|Which subject is mine?|What are my lessons about? => You teach {subject}.|Your subject is {subject}.
town: Where is my school?|In which town do I teach?|Where do I work? => Your school is in {town}.|You teach in {town}.
full_name: Who is my best pupil?|Which student is the best?|What's my top student's name? => Your best pupil is {full_name}.|It is {full_name}.
job: What does my best pupil want to be?|Which career does {full_name} plan?|What is my pupil's goal? => {full_name} wants to become a {job}.|The goal is to be a {job}.
P We keep the {object} {spot} and the spare keys with {full_name} on the {ordinal} floor.
object: What is {spot}?|Which thing do we keep {spot}?|What would I find {spot}? => The {object} is {spot}.|You keep the {object} there.
spot: Where is the {object}?|Where do we keep the {object}?|I need the {object}, where do I look? => The {object} is {spot}.|You keep it {spot}.
full_name: Who has our spare keys?|Who can let me in?|Where are the spare keys? => {full_name} has them.|The keys are with {full_name}.
ordinal: Which floor does {full_name} live on?|On what floor are the keys?|How far up do I go for the keys? => The {ordinal} floor.|It is on the {ordinal} floor.
P My father {mname} worked {work_years} years for {company} and retired in {year}. Now he spends his days on {hobby}.
mname: What is my father's name?|What's my dad called?|Who is my father? => Your father is called {mname}.|His name is {mname}.
work_years: How many years did my father work?|How long was dad employed?|How long did he stay at the firm? => He worked {work_years} years.|It was {work_years} years.
company: Where did my father work?|Who was dad's employer?|Which firm did {mname} work for? => He worked for {company}.|It was {company}.
year: When did my father retire?|In what year did dad stop working?|Since when is {mname} retired? => He retired in {year}.|It was in {year}.
hobby: What does my father do now?|How does dad spend his days?|What is {mname}'s hobby? => He spends his days on {hobby}.|His hobby is {hobby}.
P I wear size {shoe_size} shoes and love {colour}, so for the party on {date} I ordered boots from {brand}.
shoe_size: What is my shoe size?|How big are my feet?|Which size do I take? => Your shoe size is {shoe_size}.|You wear size {shoe_size}.
colour: What colour do I love?|Which shade is my favourite?|What colour would I choose? => You love {colour}.|Your favourite is {colour}.
date: When is the party?|On which date do I go out?|When do I need the boots? => The party is on {date}.|It is on {date}.
brand: Who made my boots?|Where did I order?|Which brand did I buy? => You ordered from {brand}.|The brand is {brand}.
P Our team has {number2} people. {first} does the design, {first_2} the testing, and the release is planned for {date}.
number2: How many people are on our team?|How large is the team?|What's our headcount? => Your team has {number2} people.|There are {number2} of you.
first: Who does the design?|Who is the designer?|Who makes it look good? => {first} does the design.|The designer is {first}.
first_2: Who does the testing?|Who is the tester?|Who checks for bugs? => {first_2} does the testing.|The tester is {first_2}.
date: When is the release?|What date do we ship?|When does it come out? => The release is planned for {date}.|It is on {date}.
P I was born in {town} on {date}, the last of {small} kids. My mother {fname} says I was loud from day one.
town: Where was I born?|What is my birthplace?|Which town do I come from? => You were born in {town}.|Your birthplace is {town}.
date: When was I born?|When is my birthday?|On which date do I celebrate? => You were born on {date}.|Your birthday is {date}.
small: How many kids were we?|How many children did my mother have?|How large was my family? => There were {small} kids.|Your mother had {small} children.
fname: What is my mother's name?|What's mum called?|Who is my mother? => Your mother is called {fname}.|Her name is {fname}.
P The garage code is {number4}, the alarm is {number4_2}, and if something goes wrong call {full_name}.
number4: What is the garage code?|How do I get into the garage?|What opens the garage? => The garage code is {number4}.|Type {number4}.
number4_2: What is the alarm code?|How do I turn off the alarm?|What does the alarm want? => The alarm code is {number4_2}.|It is {number4_2}.
full_name: Who do I call if something goes wrong?|Who helps in an emergency?|Who should be called? => Call {full_name}.|You should call {full_name}.
P I spent {price} on a {object} and {price_2} on a {object_2} this month, so my wife {fname} isn't speaking to me.
price: How much was the {object}?|What did I pay for the {object}?|What did the {object} cost? => The {object} cost {price}.|You paid {price}.
price_2: How much was the {object_2}?|What did I pay for the {object_2}?|What did the {object_2} cost? => The {object_2} cost {price_2}.|You paid {price_2}.
fname @wife
P {full_name} and I have been friends since school in {town}. We meet on {day}, eat {food} and play {sport}.
full_name @friend
town: Where did I go to school?|Where did we become friends?|Which town was my school in? => Your school was in {town}.|It was in {town}.
day: When do I meet {full_name}?|On which day do we meet?|When do I see my old friend? => You meet on {day}.|It is on {day}.
food: What do we eat?|What do I eat with {full_name}?|What meal do we share? => You eat {food}.|It is {food}.
sport: What do we play?|What do I play with {full_name}?|Which sport do we do? => You play {sport}.|It is {sport}.
P I'm {height} tall, {age} years old and run every {day}. My trainer {first} wants me to eat more {food}.
height: How tall am I?|What is my height?|How many centimetres do I measure? => You are {height} tall.|Your height is {height}.
age @age
day: When do I run?|On which day do I go jogging?|What day is my run? => You run on {day}.|Every {day}.
first: Who is my trainer?|What's my coach called?|Who tells me what to eat? => Your trainer is {first}.|It is {first}.
food: What should I eat more of?|What does my trainer recommend?|Which food does {first} suggest? => You should eat more {food}.|{first} recommends {food}.
P New flat since {month}: {ordinal} floor, {street}, oak doors, and a neighbour called {full_name} who keeps a {animal}.
month: When did I get the new flat?|Since when do I live there?|In which month did I move? => Since {month}.|You moved in {month}.
ordinal: Which floor is my flat on?|How high up do I live?|What floor is it? => Your flat is on the {ordinal} floor.|The {ordinal} floor.
street: On which street is my flat?|Where is the new flat?|What's my street? => Your flat is on {street}.|It is on {street}.
full_name: What is my neighbour's name?|Who lives next door?|Who is my neighbour? => Your neighbour is {full_name}.|It is {full_name}.
animal: What animal does my neighbour keep?|Which pet lives next door?|What does {full_name} have at home? => {full_name} keeps a {animal}.|Your neighbour has a {animal}.
P I'm called {first}, I work as a {job} in {city}, and I can't live without {food}.
first @name
job @job
city: Where do I work?|In which city is my work?|Where is my workplace? => You work in {city}.|Your work is in {city}.
food @food
P My sister {fname} has a {animal}, my brother {mname} a {animal_2}. I only have a plant and a subscription for {price} a month.
fname @sister
animal: What pet does my sister have?|Which animal lives with {fname}?|What does {fname} keep? => {fname} has a {animal}.|Your sister keeps a {animal}.
mname @brother
animal_2: What pet does my brother have?|Which animal lives with {mname}?|What does {mname} keep? => {mname} has a {animal_2}.|Your brother keeps a {animal_2}.
price: How much is my subscription?|What do I pay a month?|What does my subscription cost? => It is {price} a month.|You pay {price} a month.
"""

_PASSAGES_HELD_TEXT = """
P Doctor's visit today: I get {medicine} for two weeks, no more {drink}, and the next check is on {date}. Dr. {last} was very kind.
medicine: Which medicine do I get?|What was prescribed to me?|What do I have to take? => You get {medicine}.|You have to take {medicine}.
drink: What must I not drink?|Which drink is off limits?|What did they forbid? => You must not drink {drink}.|No more {drink}.
date: When is my next check?|When do I go back to the doctor?|On which date is the next visit? => It is on {date}.|You go back on {date}.
last: What is the doctor's name?|Who examined me?|Which doctor was it? => It was Dr. {last}.|The doctor is called {last}.
P For the camping trip, {first} packs the {object}, {first_2} carries the {object_2}, and nobody is allowed to forget the {food}.
object: What does {first} pack?|What is {first}'s task?|What comes with {first}? => {first} packs the {object}.|It is the {object}.
object_2: What does {first_2} carry?|What is {first_2}'s task?|What comes with {first_2}? => {first_2} carries the {object_2}.|It is the {object_2}.
food: What must not be forgotten?|Which food do we need?|What will we eat? => Nobody may forget the {food}.|It is the {food}.
P At the wedding {full_name} sat at table {number1}, sang {genre} and spilled {drink} over a guest dressed in {colour}.
number1: At which table was {full_name}?|Where did {full_name} sit?|Which table number was it? => It was table {number1}.|{full_name} sat at table {number1}.
genre: What did {full_name} sing?|Which music was sung?|What style was the singing? => {full_name} sang {genre}.|It was {genre}.
drink: What was spilled?|What landed on the guest?|What did {full_name} spill? => {full_name} spilled {drink}.|It was {drink}.
colour: What colour was the guest wearing?|How was the poor guest dressed?|Which colour got wet? => The guest was dressed in {colour}.|It was {colour}.
P Our flight got cancelled, so we are stuck in {city} in room {number3}. The Wi-Fi login is {passphrase} and dinner ends at {evening}.
city: Where are we stuck?|In which city are we waiting?|Where was our flight cancelled? => You are stuck in {city}.|You are in {city}.
number3: Which room are we in?|What's the number on our door?|Where do we sleep? => You are in room {number3}.|It is {number3}.
passphrase: What is the Wi-Fi login?|How do we get online?|What do I enter for internet? => The login is {passphrase}.|Enter {passphrase}.
evening: Until when is dinner?|When does dinner end?|How late can we eat? => Dinner ends at {evening}.|Until {evening}.
P I've decided to sell the {furniture_word}. {full_name} offered {price}, a dealer in {town} only {price_2}.
furniture_word: What am I selling?|What did I decide to give away for money?|Which thing do I sell? => You are selling the {furniture_word}.|It is the {furniture_word}.
full_name: Who offered {price}?|Who made the first offer?|Who wants to buy it? => {full_name} did.|It was {full_name}.
price: How much did {full_name} offer?|What was the offer from {full_name}?|What would {full_name} pay? => {full_name} offered {price}.|It was {price}.
price_2: How much did the dealer offer?|What would the dealer pay?|What was the dealer's price? => The dealer offered {price_2}.|Only {price_2}.
P Grandpa's will: the {vehicle} goes to {first}, the farm in {town} to {first_2}, and I get his {collectable}.
vehicle: What does {first} inherit?|What goes to {first}?|What is {first}'s share? => {first} gets the {vehicle}.|It is the {vehicle}.
first_2: Who inherits the farm?|Who gets the land?|Whose is the farm now? => {first_2} gets the farm.|It goes to {first_2}.
town: Where is the farm?|In which town is the land?|Where would I find grandpa's farm? => The farm is in {town}.|It is in {town}.
collectable: What do I inherit?|What is my share?|What did grandpa leave me? => You get his {collectable}.|You inherit the {collectable}.
P Allergic to {allergen}, scared of {fear}, and in love with a {job} from {country}: that's me in short.
allergen: What am I allergic to?|What must I avoid?|What gives me a rash? => You are allergic to {allergen}.|You must avoid {allergen}.
fear: What am I scared of?|What frightens me?|What's my phobia? => You are scared of {fear}.|It is {fear}.
job: What does the person I love do?|Which job does my love have?|Who am I in love with? => You are in love with a {job}.|It is a {job}.
country: Where is my love from?|From which country is the person I love?|What is the home country of my love? => From {country}.|The person is from {country}.
P The burglar took the {object}, left the {object_2} and went out through the window at {time}. Officer {last} is on the case, file {number6}.
object: What was stolen?|What did the burglar take?|What is gone? => The {object} was stolen.|The burglar took the {object}.
time: When did the burglar leave?|At what time did it happen?|What was the time of the break-in? => It was at {time}.|At {time}.
last: Which officer is on the case?|Who investigates?|What's the police officer called? => Officer {last}.|Officer {last} is on the case.
number6: What is the file number?|Under which number is the case?|What do I quote to the police? => The file is {number6}.|It is {number6}.
P In the school play {first} is the {costume}, {first_2} the {costume_2}, and I sew everything out of {colour} cloth.
costume: What does {first} play?|Which role has {first}?|What is {first} on stage? => {first} is the {costume}.|The role is the {costume}.
costume_2: What does {first_2} play?|Which role has {first_2}?|What is {first_2} on stage? => {first_2} is the {costume_2}.|The role is the {costume_2}.
colour: What colour is the cloth?|What do I sew with?|Which fabric colour do I use? => The cloth is {colour}.|You use {colour} cloth.
P If the boiler stops, turn the {part} and wait {minutes}. The engineer is {full_name}, customer number {number5}.
part: What do I turn if the boiler stops?|Which part needs turning?|How do I restart the heating? => Turn the {part}.|It is the {part}.
minutes: How long do I wait?|How much time does the boiler need?|When can I expect heat again? => Wait {minutes}.|It takes {minutes}.
full_name: Who is the engineer?|Who looks after the boiler?|Who could repair the heating? => The engineer is {full_name}.|It is {full_name}.
number5: What is our customer number?|Which number do I quote to the engineer?|What's our account with the heating firm? => It is {number5}.|Your customer number is {number5}.
P Half marathon done. Start number {number4}, {number3} metres of climbing, {drink} at the finish, and {first} came in right behind me.
number4: What was my start number?|Which number was on my shirt?|What did I have pinned on? => Your start number was {number4}.|It was {number4}.
number3: How many metres did I climb?|How much climbing was there?|How hilly was the race? => There were {number3} metres of climbing.|It was {number3} metres.
drink: What did I get at the finish?|What was served after the race?|What did I drink after running? => There was {drink}.|You got {drink}.
first: Who came in behind me?|Who did I beat closely?|Who finished after me? => {first} came in behind you.|It was {first}.
P I voted for {full_name}, although the neighbours on {street} all want {full_name_2}. The count is on {day}.
full_name: Who did I vote for?|Who got my vote?|Which candidate is mine? => You voted for {full_name}.|It was {full_name}.
full_name_2: Who do the neighbours want?|Which candidate is popular on {street}?|Who is the other candidate? => They want {full_name_2}.|It is {full_name_2}.
day: When is the count?|When will we know the result?|On which day do they count? => The count is on {day}.|It is on {day}.
"""
POOLS["furniture_word"] = _FURN


def _slot_pool(slot):
    return re.sub(r"_\d+$", "", slot)


def _parse_passages(text):
    out = []
    for block in text.strip().split("\nP "):
        head, *lines = block.removeprefix("P ").split("\n")
        questions = []
        for line in lines:
            m = re.match(r"(\w+)(?:: (.*)| @(\w+))$", line)
            slot, body, macro = m.groups()
            body = body if body else _MACROS[macro].replace("{*}", "{" + slot + "}")
            q, a = body.split(" => ")
            questions.append((slot, tuple(q.split("|")), tuple(a.split("|"))))
        slots = {s: _slot_pool(s) for s in re.findall(r"{(\w+)}", head)}
        out.append(Passage(head, slots, tuple(questions)))
    return tuple(out)


PASSAGES_TRAIN = _parse_passages(_PASSAGES_TRAIN_TEXT)
PASSAGES_HELD = _parse_passages(_PASSAGES_HELD_TEXT)

# ---------------------------------------------------------------- helpers

_ABBREV = ("Dr.", "no.", "Serial no.")
_LOWER_FIRST = {
    t.split(" ", 1)[0] for r in TRAIN + HELD for t in r.statements + r.updates if not t.startswith("{")
}
_LOWER_FIRST = (
    _LOWER_FIRST | {"The", "My", "Our", "In", "On", "Under", "Behind", "Next", "At", "Beside"}
) - {"I", "I'm", "I've", "I'll", "I'd", "Wi-Fi"}


def pool_draw(rng, name):
    """One string from the pool, drawn with the numpy Generator."""
    pool = POOLS[name]
    return pool(rng) if callable(pool) else _pick(rng, pool)


def as_answer(text):
    """The user's words about own things as the assistant says them: my/our -> your, I -> you, me -> you."""
    table = {
        "my": "your",
        "our": "your",
        "i": "you",
        "me": "you",
        "mine": "yours",
        "ours": "yours",
        "we": "you",
        "us": "you",
    }
    return re.sub(
        r"\b(my|our|me|mine|ours|we|us|My|Our|I|We)\b(?!')", lambda m: table[m.group(1).lower()], text
    )


def fix_articles(text):
    """a/an by the sound of the next word; 'a pair of' after 'my/the' needs no change."""

    def article(m):
        word = m.group(2)
        low = word.lower()
        vowel = low[0] in "aeiou" and not re.match(r"(uni|use|usu|euro|ukulele|one\b)", low)
        vowel = (
            vowel
            or low.startswith(("hour", "honest", "8", "11 ", "18 "))
            or low in ("11", "18")
            or (word[:2].isupper() and word[0] in "FHLMNRSX" and len(word) < 4)
        )
        a = "an" if vowel else "a"
        return (a.capitalize() if m.group(1)[0] == "A" else a) + " " + word

    return re.sub(r"\b([Aa]n?) ([A-Za-z0-9][\w'-]*)", article, text)


def sentence_case(text):
    text = text[:1].upper() + text[1:]
    return re.sub(r"(?<!Dr)(?<!no)([.!?] +)([a-z])", lambda m: m.group(1) + m.group(2).upper(), text)


def fill(template, **values):
    """Format, drop doubled articles ('the the'), fix a/an, capitalise."""
    text = template.format(**values)
    text = re.sub(r"\b(an?|the|my|your|our) (the|my|your|our) ", r"\2 ", text, flags=re.I)
    text = re.sub(r"\b[Aa] (two) ", r"\1 ", text)
    text = re.sub(r"s's\b", "s's", text)
    return sentence_case(fix_articles(text))


def with_prefix(prefix, statement):
    """'By the way,' + 'My sister ...' -> 'By the way, my sister ...'."""
    if not prefix:
        return statement
    if prefix[-1] not in ".?!:":
        first = statement.split(" ", 1)[0]
        if first in _LOWER_FIRST:
            statement = first.lower() + statement[len(first) :]
    return f"{prefix} {statement}"


def draw(rng, relation, subject=None, value=None):
    """One fact with independently chosen wordings; update(value2) gives a statement of the changed value."""
    r = relation
    x = pool_draw(rng, r.subject) if subject is None else subject
    y = value
    while y is None or y == x:
        y = pool_draw(rng, r.value)
    ax, ay = as_answer(x), as_answer(y)
    reverse = fill(_pick(rng, r.reverse), x=x, y=y) if r.reverse else None
    update = _pick(rng, r.updates)
    return {
        "statement": fill(_pick(rng, r.statements), x=x, y=y),
        "question": fill(_pick(rng, r.questions), x=x, y=y),
        "answer_full": fill(_pick(rng, r.answers), x=ax, y=ay),
        "answer_short": ay,
        "value": y,
        "subject": x,
        "reverse": reverse,
        "reverse_answer": ax if reverse else None,
        "update": lambda value2: fill(update, x=x, y=value2),
    }


def draw_value2(rng, relation, value):
    """Another value of the same pool."""
    while True:
        v = pool_draw(rng, relation.value)
        if v != value:
            return v


def draw_passage(rng, passage):
    """dict(text, values, qas=[dict(slot, question, answer_full, answer_short)]); no two slots get the same string."""
    values = {}
    for slot, pool in passage.slots.items():
        v = pool_draw(rng, pool)
        while v in values.values():
            v = pool_draw(rng, pool)
        values[slot] = v
    answers = {k: as_answer(v) for k, v in values.items()}
    return {
        "text": fill(passage.text, **values),
        "values": values,
        "qas": [
            {
                "slot": s,
                "question": fill(_pick(rng, q), **values),
                "answer_full": fill(_pick(rng, a), **answers),
                "answer_short": answers[s],
            }
            for s, q, a in passage.questions
        ],
    }


# ---------------------------------------------------------------- checks

_STOP = {
    "a",
    "an",
    "the",
    "is",
    "are",
    "was",
    "were",
    "be",
    "been",
    "has",
    "have",
    "had",
    "of",
    "for",
    "in",
    "on",
    "at",
    "to",
    "from",
    "by",
    "with",
    "and",
    "or",
    "as",
    "it",
    "its",
    "it's",
    "that",
    "this",
    "i",
    "my",
    "me",
    "we",
    "our",
    "you",
    "your",
    "his",
    "her",
    "they",
    "them",
    "s",
    "do",
    "does",
    "did",
    "not",
    "no",
    "will",
    "would",
    "can",
}


def _words(t):
    return set(re.findall(r"[a-z'-]+", re.sub(r"{[xy]}('s)?", " ", t).lower()))


def check(rng):
    problems = []
    bad = problems.append
    ids = [r.id for r in TRAIN + HELD]
    if len(ids) != len(set(ids)):
        bad(f"duplicate ids {[i for i in ids if ids.count(i) > 1]}")
    for r in TRAIN + HELD:
        if r.subject not in POOLS or r.value not in POOLS:
            bad(f"{r.id}: pool missing")
            continue
        for field, n in (("statements", 6), ("questions", 5), ("answers", 3), ("updates", 2)):
            if len(getattr(r, field)) < n:
                bad(f"{r.id}: {len(getattr(r, field))} {field}")
        for t in r.statements + r.updates:
            if t.count("{y}") != 1 or t.count("{x}") != (r.subject != "me"):
                bad(f"{r.id}: slots in {t!r}")
        if sum(not re.search(r"{y}\W*$", t) for t in r.statements) < 2:
            bad(f"{r.id}: value last too often")
        for t in r.questions:
            if "{y}" in t or ("{x}" in t) != (r.subject != "me"):
                bad(f"{r.id}: question {t!r}")
        for t in r.answers:
            if "{y}" not in t:
                bad(f"{r.id}: answer {t!r}")
        said = set().union(*map(_words, r.statements)) - _STOP
        far = sum(
            len((_words(q) - _STOP) & said) <= 0.5 * max(1, len(_words(q) - _STOP)) for q in r.questions
        )
        if far < 2:
            bad(f"{r.id}: only {far} questions far from the statements")
        for t in r.statements + r.questions + r.answers + r.reverse + r.updates:
            fill(t, x=pool_draw(rng, r.subject), y=pool_draw(rng, r.value))
    train = [(t, _words(t)) for r in TRAIN for t in r.statements]
    for r in HELD:
        for t in r.statements:
            w = _words(t)
            for t2, w2 in train:
                c = (w & w2) - _STOP
                if len(w & w2) > 0.6 * max(len(w), len(w2)) or len(c) > 0.6 * max(1, len(w - _STOP)):
                    bad(f"{r.id}: {t!r} is near {t2!r}")
    for p in PASSAGES_TRAIN + PASSAGES_HELD:
        for slot, q, a in p.questions:
            if slot not in p.slots or len(q) < 3 or len(a) < 2:
                bad(f"passage {p.text[:40]!r}: {slot}")
        if len(p.questions) < 3:
            bad(f"passage {p.text[:40]!r}: few questions")
        if any(v not in POOLS for v in p.slots.values()):
            bad(f"passage {p.text[:40]!r}: pool")
        else:
            for _ in range(4):
                draw_passage(rng, p)
    return problems


if __name__ == "__main__":
    rng = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for i in range(30):
        r = _pick(rng, TRAIN if i < 22 else HELD)
        d = draw(rng, r)
        print(
            f"[{r.id}] {with_prefix(_pick(rng, STATE_PREFIXES), d['statement'])}\n    Q {d['question']}  A {d['answer_full']} / {d['answer_short']}\n"
            f"    R {d['reverse']} {d['reverse_answer'] or ''}  U {d['update'](draw_value2(rng, r, d['value']))}"
        )
    for i in range(5):
        d = draw_passage(rng, _pick(rng, PASSAGES_TRAIN if i < 3 else PASSAGES_HELD))
        print("\n" + d["text"])
        for qa in d["qas"]:
            print(f"    Q {qa['question']}  A {qa['answer_full']} / {qa['answer_short']}")
    found = check(rng)
    print(
        f"\nTRAIN {len(TRAIN)} ({sum(r.subject == 'me' for r in TRAIN)} me), HELD {len(HELD)} ({sum(r.subject == 'me' for r in HELD)} me), "
        f"PASSAGES {len(PASSAGES_TRAIN)}/{len(PASSAGES_HELD)}, SMALLTALK {len(SMALLTALK)}, UNKNOWN {len(UNKNOWN)}, "
        f"PREFIXES {len(STATE_PREFIXES)}, ACKS {len(ACKS)}, first names {len(set(FIRST))}, last {len(set(LAST))}, cities {len(CITY)}, towns {len(TOWN)}, "
        f"jobs {len(JOB)}, foods {len(FOOD)}, objects {len(OBJECT)}, passphrase words {len(ADJ)}/{len(NOUN)}"
    )
    print("problems:", len(found), *found, sep="\n")

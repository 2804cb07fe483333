"""Makes the texts between the evidence of a question: sentences, keys, names and numbers of our own words.

Sentences contain no digit, no town and no person, so they contain no answer.  All texts are ASCII.
"""

from sft.data.long.draws import Draws, Order

_TIMES = (
    "At dawn|Before noon|In the evening|After the rain|On a calm day|Late at night|During the market|In early spring|"
    "On the last day of the week|While the shops were closed|Toward the end of summer|Without any hurry"
).split("|")
_WHO = (
    "the baker|a tired clerk|the old gardener|two students|the night guard|a young painter|the ferry crew|"
    "a retired teacher|the village choir|an honest miller|the tailor|a careful nurse|the postman|a group of hikers|"
    "the glass blower|an apprentice"
).split("|")
_DID = (
    "carried|repaired|described|sold|painted|borrowed|forgot|measured|wrapped|found|cleaned|admired|lifted|counted|"
    "covered|moved"
).split("|")
_WHAT = (
    "a wooden ladder|the brass lamp|some wet canvas|an empty barrel|a basket of pears|the torn curtain|a heavy rug|"
    "three clay pots|the broken clock|a pile of letters|the copper kettle|a bundle of reeds|an old map|"
    "the kitchen table|a jar of honey|the garden gate"
).split("|")
_WHERE = (
    "near the bridge|behind the mill|beside the well|under the arches|in the north hall|along the canal|"
    "at the foot of the hill|next to the stables|across the meadow|in front of the library|below the stairs|"
    "outside the walls"
).split("|")
COLOURS = (
    "amber|azure|black|blue|brown|coral|cream|crimson|golden|gray|green|indigo|ivory|lilac|olive|orange|pink|purple|"
    "red|ruby|silver|teal|white|yellow"
).split("|")
BUILDINGS = (
    "archive|bakery|barn|cabin|castle|cellar|chapel|cottage|depot|factory|farm|foundry|garage|garden|granary|harbor|"
    "hostel|kiosk|laundry|library|market|mill|museum|office|palace|pantry|pavilion|quarry|school|shelter|stable|"
    "studio|temple|theater|tower|vault|villa|warehouse|windmill|workshop"
).split("|")
TOWNS = (
    "Arlen|Belmor|Cadwick|Dorvane|Eskby|Farholt|Garnsey|Halden|Iverly|Jarrow|Kelmont|Lowick|Marsden|Norvale|Ostrey|"
    "Penhurst|Quarley|Rosby|Selwick|Tarnby|Ulverton|Vernham|Wexley|Yarmby|Zelford|Ashmere|Brindle|Colford|Dunmore|"
    "Elstow|Fenwick|Glenby|Hartley|Inverly|Kirkdale|Lambton|Millom|Netherby|Oakham|Prestwick"
).split("|")
FIRST_NAMES = (
    "Ada|Boris|Clara|Dmitri|Edith|Felix|Greta|Hugo|Irene|Jonas|Karin|Leon|Mira|Nils|Olga|Pavel|Quinn|Rosa|Stefan|"
    "Tilda|Ulrich|Vera|Walter|Xenia|Yannis|Zora|Anton|Bruno|Cecile|Dora|Emil|Frieda|Gustav|Hedda|Ivan|Jutta|Klaus|"
    "Lena|Moritz|Nora"
).split("|")
LAST_NAMES = (
    "Abel|Bauer|Cole|Drake|Engel|Fisk|Gray|Holm|Irving|Jansen|Keller|Lund|Moss|Nash|Orlov|Pike|Quist|Reed|Stone|"
    "Thorn|Unger|Voss|Wolfe|Young|Zeller|Adler|Berg|Crane|Dahl|Ellis|Frost|Grant|Hess|Isak|Jung|Koch|Lang|Marsh|"
    "Noble|Olsen"
).split("|")
FLOWERS = (
    "aster|begonia|camellia|daffodil|daisy|fuchsia|geranium|hyacinth|iris|jasmine|lavender|lily|lotus|magnolia|"
    "marigold|mimosa|orchid|pansy|peony|petunia|poppy|primrose|rose|snowdrop|sunflower|thistle|tulip|verbena|violet|"
    "zinnia"
).split("|")
# A place that everybody knows, and the city in which it is.  The two names have no word in common.
LANDMARKS = (
    ("the Colosseum", "Rome"),
    ("the Eiffel Tower", "Paris"),
    ("the Brandenburg Gate", "Berlin"),
    ("the Kremlin", "Moscow"),
    ("the Acropolis", "Athens"),
    ("the Sagrada Familia", "Barcelona"),
    ("the Statue of Liberty", "New York"),
    ("Big Ben", "London"),
    ("the Hagia Sophia", "Istanbul"),
    ("the Little Mermaid statue", "Copenhagen"),
    ("the Golden Gate Bridge", "San Francisco"),
    ("the Burj Khalifa", "Dubai"),
    ("the Forbidden City", "Beijing"),
    ("the Atomium", "Brussels"),
    ("the Prado", "Madrid"),
    ("the Rialto Bridge", "Venice"),
)


def sentence(draws: Draws) -> str:
    """A sentence without digits, towns and persons: "At dawn, the baker sold an old map near the bridge."."""
    parts = [draws.choice(words) for words in (_TIMES, _WHO, _DID, _WHAT, _WHERE)]
    return f"{parts[0]}, {' '.join(parts[1:])}."


class KeyNames:
    """Different keys, such as "the amber bakery of Farholt", in a random order."""

    def __init__(self, draws: Draws) -> None:
        self._order = draws.order(len(COLOURS) * len(BUILDINGS) * len(TOWNS))

    def __getitem__(self, i: int) -> str:
        """Key i.  Keys with different i differ; after the words are used up, a number is added."""
        colour, building, town = _parts(self._order, i, (COLOURS, BUILDINGS, TOWNS))
        round_number = i // self._order.size
        return f"the {colour} {building} of {town}" + (f" number {round_number + 1}" if round_number else "")


class Persons:
    """Different persons, such as "Mira Nils Holm", in a random order."""

    def __init__(self, draws: Draws) -> None:
        self._order = draws.order(len(FIRST_NAMES) ** 2 * len(LAST_NAMES))

    def __getitem__(self, i: int) -> str:
        """Person i.  Persons with different i differ."""
        names = " ".join(_parts(self._order, i, (FIRST_NAMES, FIRST_NAMES, LAST_NAMES)))
        round_number = i // self._order.size
        return names + (f" the {round_number + 1}th" if round_number else "")


def _parts(order: Order, i: int, lists: tuple[list[str], ...]) -> list[str]:
    """A word of each list, by element i of the order of all combinations."""
    number, words = order[i], []
    for options in lists:
        number, word = divmod(number, len(options))
        words.append(options[word])
    return words

"""Word lists for the task generators, and a generator of invented words.

For facts see ``facts.py``, for wordings ``sample.py``. Called by every ``tasks_*`` module and by ``stories.py``.
"""

from __future__ import annotations

from random import Random

from infra.demo_model.texts.lists import split_words

NAMES = split_words(
    "Anna Ben Carla David Emma Felix Grace Henry Ivy Jack Kate Leo Mia Noah Olivia Paul Quinn Rosa Sam Tina "
    "Uma Victor Wendy Xavier Yara Zoe Alice Bob Charlie Diana Ethan Fiona George Hannah Isaac Julia Kevin "
    "Laura Max Nina Oscar Paula Ralph Sara Tom Ursula Vera Will Ximena Yusuf Adam Bella Clara Daniel Elena "
    "Frank Gina Hugo Irene James Karen Lucas Maria Nathan Oliver Peter Rachel Simon Teresa Vincent Walter "
    "Amir Aisha Chen Mei Ravi Priya Kofi Ama Ivan Olga Pedro Lucia Hans Greta Lars Ingrid Marco Giulia "
    "Pierre Chloe John Mary Robert Linda Michael Susan Sophie Liam Lily Omar Fatima Ali Layla Ken Yuki Jin "
    "Sofia Alex Chris Dana Eric Helen Joe Kim Lena Mark Nora Otto Pia Ruth Steve Theo Vivian Zach Amy Brian "
    "Cathy Doug Ella Fred Gwen Harry Iris Jane"
)

ANIMALS = split_words(
    "dog cat horse cow pig sheep goat duck hen fox wolf bear lion tiger rabbit mouse frog owl crow eagle "
    "snake turtle whale shark dolphin seal penguin monkey elephant giraffe zebra camel deer squirrel "
    "hedgehog bat bee ant spider butterfly snail otter beaver badger parrot swan goose"
)

COLOURS = split_words("red blue green yellow orange purple pink brown black white grey silver gold")

FRUITS = split_words(
    "apple banana cherry grape lemon mango orange peach pear plum melon kiwi fig lime apricot strawberry "
    "blueberry raspberry pineapple coconut"
)

FOODS = split_words(
    "bread cheese soup rice pasta cake pizza salad honey butter milk tea coffee juice sugar salt egg potato "
    "carrot tomato onion bean cookie pie sandwich chocolate"
)

THINGS = split_words(
    "book pen table chair lamp cup plate spoon fork knife box bag ball kite drum bell clock key door window "
    "mirror bed pillow blanket coat hat shoe sock glove ring coin stone shell feather candle bottle basket "
    "ladder hammer nail rope wheel cart boat ship train car bus bike plane rocket phone radio camera guitar "
    "piano violin flute pencil paper map flag tent lantern umbrella bucket brush broom needle button ticket "
    "letter stamp card toy doll puzzle robot engine laptop screen"
)

PLACES = split_words(
    "garden forest river lake sea mountain hill valley beach desert island village town city farm barn "
    "castle tower bridge road path park school library market kitchen house cave meadow field harbor station "
    "museum bakery playground attic cellar"
)

ADJECTIVES = split_words(
    "small big old new red quiet loud happy sad bright dark warm cold soft hard fast slow kind brave clever "
    "gentle tiny huge shiny dusty sweet sour fresh strange funny proud calm busy lazy hungry sleepy young "
    "tall short long round flat empty full clean dirty strong weak light heavy"
)

VERBS = split_words(
    "run walk jump swim fly sing dance read write draw paint cook bake clean wash build fix open close push "
    "pull throw catch carry find lose hide seek climb fall sleep wake eat drink laugh cry smile wait look "
    "listen speak talk whisper shout play work learn teach help give take bring buy sell"
)

PLURALS = split_words(
    "dogs cats birds whales trees stars clouds rivers flowers children teachers farmers sailors robots "
    "dragons mountains waves stones bees horses friends lions ships trains bells candles dreams songs apples "
    "pears books"
)

NATURE = split_words(
    "sun moon star sky cloud rain snow wind storm rainbow fire water earth sand leaf tree flower rose grass "
    "seed root branch wave ocean spring summer autumn winter morning night evening thunder"
)

JOBS = split_words(
    "teacher doctor nurse baker farmer pilot painter singer writer driver cook engineer plumber lawyer "
    "dentist carpenter gardener librarian sailor tailor programmer scientist musician actor builder "
    "electrician firefighter mechanic waiter"
)

CITIES = split_words(
    "Paris London Berlin Madrid Rome Vienna Lisbon Dublin Oslo Athens Warsaw Prague Cairo Nairobi Delhi "
    "Tokyo Seoul Sydney Toronto Boston Chicago Denver Dallas Miami Lima Milan Munich Hamburg Zurich Geneva "
    "Lyon Porto Seville Krakow Mumbai Osaka Kyoto Austin Seattle Montreal Manchester Glasgow"
)

OBJECT_NOUNS = THINGS + FRUITS + FOODS
ALL_NOUNS = sorted(set(ANIMALS + FRUITS + FOODS + THINGS + PLACES + NATURE + JOBS))
ALL_WORDS = sorted(set(ALL_NOUNS + ADJECTIVES + VERBS + COLOURS + PLURALS))

_ONSETS = split_words("b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl pr sh sl st th tr")
_NUCLEI = split_words("a e i o u a e i o u ai ea ee oo ou")
_CODAS = ["", "", *split_words("n r l s t m k x nd rt")]


def invent(rng: Random, syllables: int = 0) -> str:
    """A pronounceable word that means nothing, for copying and for unknown names."""
    count = syllables or rng.choice((1, 2, 2, 2, 3))
    parts = [rng.choice(_ONSETS) + rng.choice(_NUCLEI) for _ in range(count)]
    return "".join(parts) + rng.choice(_CODAS)


def person(rng: Random) -> str:
    """A first name: mostly a common one, sometimes an invented one."""
    return rng.choice(NAMES) if rng.random() < 0.65 else invent(rng).capitalize()


def town(rng: Random) -> str:
    """A town: mostly a real one, sometimes an invented one."""
    return rng.choice(CITIES) if rng.random() < 0.7 else invent(rng, 2).capitalize()


def several(rng: Random, pool: list[str], low: int, high: int) -> list[str]:
    """Between ``low`` and ``high`` distinct words of ``pool``."""
    return rng.sample(pool, rng.randint(low, high))


def plural(noun: str) -> str:
    """The regular English plural of ``noun``."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun in ("knife", "leaf"):
        return noun.replace("fe", "f").rstrip("f") + "ves"
    return noun + "s"


def article(word: str) -> str:
    """``a`` or ``an``, depending on the first letter."""
    return "an" if word[0].lower() in "aeiou" else "a"

"""The facts the demo model is taught, as tables.

Wordings are in ``tasks_facts.py``, which uses these tables, as do ``corpus.py`` and ``tasks_unknown.py`` (to ask about
things that are *not* here).
"""

from __future__ import annotations

from infra.demo_model.texts.lists import piped, split_words


def _pairs(text: str) -> dict[str, str]:
    """``a: b; c: d`` as a dictionary."""
    parts = (part.split(":") for part in " ".join(text.split()).strip(";").split(";"))
    return {one.strip(): other.strip() for one, other in parts}


CAPITALS = _pairs(
    """
    France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; Ireland: Dublin; Austria:
    Vienna; Greece: Athens; Poland: Warsaw; Norway: Oslo; Sweden: Stockholm; Denmark: Copenhagen; Finland:
    Helsinki; the Netherlands: Amsterdam; Belgium: Brussels; Switzerland: Bern; Hungary: Budapest; Romania:
    Bucharest; Bulgaria: Sofia; Croatia: Zagreb; Serbia: Belgrade; Ukraine: Kyiv; Russia: Moscow; Turkey:
    Ankara; Egypt: Cairo; Morocco: Rabat; Kenya: Nairobi; Ethiopia: Addis Ababa; South Africa: Pretoria;
    Nigeria: Abuja; Ghana: Accra; Tunisia: Tunis; Algeria: Algiers; Senegal: Dakar; Uganda: Kampala; Japan:
    Tokyo; China: Beijing; India: New Delhi; South Korea: Seoul; Thailand: Bangkok; Vietnam: Hanoi;
    Indonesia: Jakarta; Malaysia: Kuala Lumpur; Pakistan: Islamabad; Nepal: Kathmandu; Iran: Tehran; Iraq:
    Baghdad; Saudi Arabia: Riyadh; Israel: Jerusalem; Jordan: Amman; Lebanon: Beirut; Australia: Canberra;
    New Zealand: Wellington; Canada: Ottawa; the United States: Washington, D.C.; Mexico: Mexico City; Cuba:
    Havana; Jamaica: Kingston; Brazil: Brasilia; Argentina: Buenos Aires; Chile: Santiago; Peru: Lima;
    Colombia: Bogota; Venezuela: Caracas; Ecuador: Quito; Uruguay: Montevideo; Paraguay: Asuncion; Iceland:
    Reykjavik; Estonia: Tallinn; Latvia: Riga; Lithuania: Vilnius; Slovakia: Bratislava; Slovenia:
    Ljubljana; Cyprus: Nicosia; Malta: Valletta; Luxembourg: Luxembourg City; the Czech Republic: Prague;
    the United Kingdom: London; England: London; Scotland: Edinburgh; Wales: Cardiff; the Philippines:
    Manila; Singapore: Singapore; Mongolia: Ulaanbaatar; Bangladesh: Dhaka; Sri Lanka: Colombo; Afghanistan:
    Kabul; Panama: Panama City; Albania: Tirana
    """
)

CONTINENTS = {
    "Europe": split_words(
        "France Germany Italy Spain Portugal Ireland Austria Greece Poland Norway Sweden Denmark Finland "
        "Belgium Switzerland Hungary Romania Iceland"
    ),
    "Africa": split_words("Egypt Morocco Kenya Ethiopia Nigeria Ghana Tunisia Algeria Senegal Uganda"),
    "Asia": split_words("Japan China India Thailand Vietnam Nepal Iran Iraq Pakistan"),
    "South America": split_words("Brazil Argentina Chile Peru Colombia Venezuela Ecuador"),
    "North America": split_words("Canada Mexico Cuba"),
}

OPPOSITES = _pairs(
    """
    hot: cold; big: small; tall: short; happy: sad; fast: slow; light: dark; open: closed; up: down; left:
    right; good: bad; old: new; young: old; full: empty; hard: soft; loud: quiet; wet: dry; clean: dirty;
    early: late; high: low; in: out; day: night; long: short; rich: poor; strong: weak; thick: thin; wide:
    narrow; heavy: light; near: far; first: last; easy: difficult; true: false; yes: no; black: white; push:
    pull; buy: sell; win: lose; start: stop; love: hate; begin: end; give: take; alive: dead; awake: asleep;
    brave: afraid; cheap: expensive; deep: shallow; sweet: sour; inside: outside; over: under; before:
    after; always: never; north: south; east: west; summer: winter; friend: enemy; question: answer; laugh:
    cry; rough: smooth; sharp: blunt; safe: dangerous; same: different; simple: complex; warm: cool; war:
    peace; top: bottom; front: back; on: off; large: small; small: large; cold: hot; slow: fast; sad: happy;
    down: up; dark: light; night: day; short: long; low: high; right: left; empty: full; soft: hard; dry:
    wet; late: early
    """
)

COLOUR_OF = _pairs(
    """
    the sky: blue; grass: green; snow: white; coal: black; a banana: yellow; a lemon: yellow; blood: red;
    the sun: yellow; a carrot: orange; a strawberry: red; milk: white; chocolate: brown; a tomato: red; a
    leaf: green; the sea: blue; a flamingo: pink; an elephant: grey; a crow: black; a cucumber: green; salt:
    white; sugar: white; an orange: orange; a cherry: red; a pumpkin: orange; a frog: green; a polar bear:
    white; gold: golden yellow; silver: grey; ketchup: red; mustard: yellow; broccoli: green; coffee: brown;
    a fire truck: red; a swan: white; a lime: green; the night sky: black
    """
)

SOUNDS = _pairs(
    """
    dog: woof; cat: meow; cow: moo; sheep: baa; horse: neigh; duck: quack; pig: oink; lion: roar; frog:
    ribbit; bee: buzz; snake: hiss; owl: hoot; rooster: cock-a-doodle-doo; mouse: squeak; goat: maa; crow:
    caw; wolf: howl; hen: cluck
    """
)

BABIES = _pairs(
    """
    dog: puppy; cat: kitten; cow: calf; sheep: lamb; horse: foal; duck: duckling; pig: piglet; lion: cub;
    bear: cub; goat: kid; hen: chick; deer: fawn; frog: tadpole; kangaroo: joey; swan: cygnet; owl: owlet;
    elephant: calf; goose: gosling
    """
)

LEGS = {
    4: split_words(
        "dog cat horse cow pig sheep goat fox wolf bear lion tiger rabbit mouse elephant zebra camel deer frog"
    ),
    2: split_words("bird duck hen owl crow eagle penguin goose swan human"),
    6: split_words("ant bee butterfly beetle fly"),
    8: split_words("spider octopus"),
    0: split_words("snake fish whale shark worm"),
}

KINDS = {
    "animal": split_words(
        "dog cat horse cow pig sheep goat duck fox wolf bear lion tiger rabbit mouse frog owl snake whale"
    ),
    "fruit": split_words("apple banana cherry grape lemon mango orange peach pear plum melon kiwi strawberry"),
    "vegetable": split_words("carrot potato onion cabbage spinach broccoli lettuce cucumber"),
    "colour": split_words("red blue green yellow purple pink brown black white"),
    "vehicle": split_words("car bus train bike boat ship plane truck"),
    "musical instrument": split_words("guitar piano violin flute drum trumpet"),
    "piece of furniture": split_words("chair table bed sofa desk"),
}

DAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = split_words("January February March April May June July August September October November December")
MONTH_DAYS = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))


def _questions(text: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Paragraphs of question wordings, separated by ``|``, and their common answer after ``=``."""
    parts = (" ".join(paragraph.split()).split(" = ") for paragraph in text.strip().split("\n\n"))
    return tuple((piped(asked), answer) for asked, answer in parts)


GENERAL = _questions(
    """
What is the largest ocean? | Which ocean is the biggest? | Name the largest ocean.
= The largest ocean is the Pacific Ocean.

What is the largest planet? | Which planet is the biggest? | What is the biggest planet in the solar system?
= The largest planet is Jupiter.

What is the smallest planet? | Which planet is the smallest?
= The smallest planet is Mercury.

Which planet is closest to the sun? | What planet is nearest to the sun?
= Mercury is closest to the sun.

Which planet is known as the red planet? | What is the red planet?
= Mars is called the red planet.

What planet do we live on? | Which planet do humans live on? | What is our planet called?
= We live on Earth.

How many planets are there? | How many planets are in the solar system?
= There are 8 planets in the solar system.

Name the planets. | List the planets. | What are the planets of the solar system?
= Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.

How many continents are there? | What is the number of continents?
= There are 7 continents.

Name the continents. | List the continents. | What are the continents?
= Africa, Antarctica, Asia, Australia, Europe, North America and South America.

What is the largest animal? | Which animal is the biggest? | What is the biggest animal in the world?
= The largest animal is the blue whale.

What is the tallest animal? | Which animal is the tallest?
= The tallest animal is the giraffe.

What is the fastest animal? | Which land animal is the fastest?
= The fastest land animal is the cheetah.

What is the highest mountain? | What is the tallest mountain in the world? | Which mountain is the highest?
= The highest mountain is Mount Everest.

What is the longest river? | Which river is the longest?
= The Nile is usually called the longest river.

What is the largest country? | Which country is the biggest?
= The largest country is Russia.

How many days are in a week? | How many days does a week have? | Number of days in a week?
= A week has 7 days.

How many months are in a year? | How many months does a year have?
= A year has 12 months.

How many days are in a year? | How many days does a year have?
= A year has 365 days, and a leap year has 366.

How many hours are in a day? | How many hours does a day have?
= A day has 24 hours.

How many minutes are in an hour? | How many minutes does an hour have?
= An hour has 60 minutes.

How many seconds are in a minute? | How many seconds does a minute have?
= A minute has 60 seconds.

How many weeks are in a year? | How many weeks does a year have?
= A year has 52 weeks.

How many seasons are there? | What are the seasons? | Name the four seasons.
= There are 4 seasons: spring, summer, autumn and winter.

What are the days of the week? | Name the days of the week. | List the days of the week.
= Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.

What are the months of the year? | List the months. | Name the months of the year.
= January, February, March, April, May, June, July, August, September, October, November and December.

What are the primary colours? | What are the primary colors? | Name the primary colors.
= The primary colours are red, yellow and blue.

What colour do you get from blue and yellow? | What color do blue and yellow make? | Mix blue and yellow
= Blue and yellow make green.

What colour do you get from red and yellow? | What color do red and yellow make? | Mix red and yellow
= Red and yellow make orange.

What colour do you get from red and blue? | What color do red and blue make? | Mix red and blue
= Red and blue make purple.

What are the colours of the rainbow? | Name the colors of the rainbow. | Which colors are in a rainbow?
= Red, orange, yellow, green, blue, indigo and violet.

What do bees make? | What does a bee make?
= Bees make honey.

What do cows eat? | What does a cow eat?
= Cows eat grass.

What do cows give us? | What do we get from cows?
= We get milk from cows.

What is water made of? | What is water? | What is H2O?
= Water is made of hydrogen and oxygen; its formula is H2O.

At what temperature does water boil? | When does water boil? | What is the boiling point of water?
= Water boils at 100 degrees Celsius.

At what temperature does water freeze? | When does water freeze? | What is the freezing point of water?
= Water freezes at 0 degrees Celsius.

What is ice? | What is ice made of?
= Ice is frozen water.

What is snow? | What is snow made of?
= Snow is frozen water that falls from the clouds.

What is rain? | Where does rain come from?
= Rain is water that falls from the clouds.

What is the sun? | What kind of thing is the sun?
= The sun is a star.

What is the moon? | What does the moon do?
= The moon is a ball of rock that circles the Earth.

What is a star? | What are stars?
= A star is a huge ball of hot gas that gives light.

Where does the sun rise? | In which direction does the sun rise?
= The sun rises in the east.

Where does the sun set? | In which direction does the sun set?
= The sun sets in the west.

How many legs does a spider have? | How many legs do spiders have?
= A spider has 8 legs.

How many legs does a dog have? | How many legs do dogs have?
= A dog has 4 legs.

How many fingers do I have? | How many fingers does a person have?
= A person usually has 10 fingers.

How many letters are in the alphabet? | How many letters does the alphabet have?
= The English alphabet has 26 letters.

Say the alphabet. | What is the alphabet? | Recite the alphabet. | List the letters of the alphabet.
= A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z

What are the vowels? | Name the vowels. | List the vowels.
= The vowels are a, e, i, o and u.

What is a triangle? | How many sides does a triangle have?
= A triangle is a shape with 3 sides.

What is a square? | How many sides does a square have?
= A square is a shape with 4 equal sides.

What do you use to write? | What can I write with?
= You can write with a pen or a pencil.

Who wrote Romeo and Juliet? | Who wrote Hamlet? | Who is the author of Hamlet?
= William Shakespeare wrote it.

Who painted the Mona Lisa? | Who is the painter of the Mona Lisa?
= Leonardo da Vinci painted the Mona Lisa.

What language is spoken in France? | Which language do people speak in France?
= People in France speak French.

What language is spoken in Spain? | Which language do people speak in Spain?
= People in Spain speak Spanish.

What language is spoken in Germany? | Which language do people speak in Germany?
= People in Germany speak German.

What language is spoken in Brazil? | Which language do people speak in Brazil?
= People in Brazil speak Portuguese.

What language is spoken in Japan? | Which language do people speak in Japan?
= People in Japan speak Japanese.

What is the currency of Japan? | What money do they use in Japan?
= The currency of Japan is the yen.

What is the currency of the United States? | What money do they use in the USA?
= The currency of the United States is the dollar.

What is the currency of France? | What money do they use in Germany? | What is the currency of Germany?
= The currency there is the euro.

What is pi? | What is the value of pi? | How much is pi?
= Pi is about 3.14.

What is Python? | What is python used for? | Do you know Python?
= Python is a programming language. I know the name, but I cannot write programs.

What is a language model? | What is an LLM? | What is a large language model?
= A language model is a program that continues text word by word. I am a very small one.

What is a token? | What are tokens?
= A token is a piece of text, such as a word or a part of one. I read and write tokens.

What is a GPU? | What does GPU mean? | What are GPUs for?
= A GPU is a processor that does many calculations at once. Large models run on GPUs.

What is AI? | What is artificial intelligence?
= AI means artificial intelligence: programs that do things we usually need thinking for.

What is a computer? | What is a computer for?
= A computer is a machine that follows instructions.

What is HTTP? | What is an API? | What does API mean?
= An API is a way for programs to talk to each other, often over HTTP.

What comes after Z? | What is the letter after Z? | Which letter comes after Z?
= Nothing: Z is the last letter of the alphabet.

What comes after A? | Which letter comes after A? | What letter comes after a?
= The letter after A is B.

Which is heavier, a kilogram of feathers or a kilogram of stones? | What weighs more, a kilo of feathers or a
kilo of iron?
= Neither: both weigh one kilogram.
"""
)

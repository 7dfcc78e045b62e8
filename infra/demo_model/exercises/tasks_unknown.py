"""Questions outside the model's knowledge, answered with "I do not know".

They teach that the honest answer of a tiny model to most questions is "I do not know". This is not a safety filter.
Importing the module registers its tasks.
"""

from __future__ import annotations

from random import Random

from infra.demo_model.sample import Expect, Sample, ask, fold, loosen, phrase, task
from infra.demo_model.texts import facts, prose
from infra.demo_model.texts.lists import piped
from infra.demo_model.texts.words import ALL_NOUNS, CITIES, JOBS, NAMES, VERBS, invent, person, plural

UNKNOWN = (
    "I am a very small model and do not know that.",
    "I am sorry, I do not know that. I am only a very small model.",
)
CANNOT = (
    "I am sorry, that is beyond what such a small model can do.",
    "I cannot do that: I am only a very small model.",
)
_DO_NOT = ("not", "cannot", "sorry", "beyond", "only")

_TOPICS = piped("""
quantum physics | the stock market | black holes | the theory of relativity | machine learning | neural
networks | the French Revolution | photosynthesis | inflation | climate change | blockchain | evolution |
gravity | democracy | philosophy | chess | football | cooking | history | religion | the Roman Empire |
World War II | the Cold War | DNA | vaccines | electricity | magnetism | the internet | databases |
Kubernetes | Linux | Docker | recursion | jazz | opera | the Middle Ages | dinosaurs | volcanoes |
earthquakes | tax law | mortgages | insurance | meditation | yoga | nutrition | vitamins | protein | the
human brain | the heart | cancer | depression | diabetes | the immune system | bacteria | viruses | atoms |
molecules | chemistry | biology | calculus | algebra | statistics | probability | geometry | prime numbers |
string theory | transformers | attention | tokenization | GPUs | CUDA | compilers | operating systems |
semiconductors | robots | space travel | Mars | the big bang | galaxies | poetry | Shakespeare | Beethoven |
Picasso | Einstein | Napoleon | Cleopatra | Marie Curie | Newton | Darwin | Plato | Gandhi | Mozart |
capitalism | socialism | globalization | bitcoin | elections | the meaning of life | happiness | marriage |
parenting | gardening | knitting | photography | car engines | plumbing | wine | coffee making | sourdough
""")

_ABOUT = piped(
    "Explain {t}. | What is {t}? | Tell me about {t}. | How does {t} work? | Explain {t} to me | "
    "What do you know about {t}? | Why is {t} important? | Write an essay about {t}. | Summarize {t} | "
    "Give me an overview of {t} | Who invented {t}? | What are the advantages of {t}? | Describe {t} | "
    "What is the history of {t}? | Teach me {t} | Can you explain {t} in simple terms? | "
    "Write an article about {t} | What do you think about {t}? | How can I learn {t}? | "
    "Who discovered {t}? | When did {t} start? | Explain {t} like I am five. | "
    "What is the difference between {t} and {u}? | Compare {t} and {u}. | Is {t} better than {u}? | "
    "Give me ten facts about {t} | Write 500 words on {t} | Explain the basics of {t} | "
    "What are the main ideas of {t}? | Why do people care about {t}? | How did {t} begin? | "
    "What causes {t}? | Define {t}. | What does {t} mean?"
)  # fmt: skip

_WORLD = piped(
    "What is the weather today? | What is the weather in {c}? | What time is it? | What is the date today? | "
    "What day is it today? | What year is it? | Who is the president of {n}? | Who is the king of {n}? | "
    "What is the population of {n}? | How many people live in {c}? | What is the news today? | "
    "Who won the game yesterday? | Who won the World Cup in {y}? | What happened in {y}? | "
    "When was {p} born? | Who is {p} {q}? | Where is {p} {q}? | How far is {c} from {d}? | "
    "How do I get from {c} to {d}? | What is a good restaurant in {c}? | What should I see in {c}? | "
    "Tell me about {c}. | What is the best hotel in {c}? | How much does a {o} cost? | "
    "What is the price of gold? | Where can I buy a {o}? | How do I make a {o}? | How do I repair a {o}? | "
    "What is the history of {n}? | Who wrote the book about the {o}? | Who invented the {o}? | "
    "Why do {os} exist? | What is the best {o}? | Which {o} should I buy? | Recommend a movie. | "
    "Recommend a book | What film should I watch? | What should I eat tonight? | "
    "Give me a recipe for {o} soup. | How do I cook {o}? | How can I become a {j}? | "
    "How much does a {j} earn? | What does a {j} do all day? | What is the square root of {k}? | "
    "What is {k} to the power of {m}? | What is the {k}th prime number? | What is {k}% of {y}? | "
    "Solve x + {k} = {y} | What is the meaning of life? | Why is the sky blue? | How old is the universe? | "
    "Does god exist? | What is love? | Why do cats purr? | Why do {os} {v}? | Can {os} {v}? | "
    "How do {os} {v}? | When do {os} {v}? | What happens if you {v} a {o}? | Who was {p} {q}? | "
    "What is the phone number of {p}? | What is the zip code of {c}? | What is the GDP of {n}? | "
    "Who founded {c}? | When was {c} founded? | What is the fastest way to {v}? | Should I {v} or not? | "
    "Should I buy a {o}? | What is better, a {o} or a {o2}? | Is it going to rain tomorrow? | "
    "How do I lose weight? | Am I sick? | I have a headache, what should I do? | "
    "What medicine should I take? | Can you give me legal advice? | Should I invest in stocks? | "
    "What are the lottery numbers? | What is the melting point of {o}? | How heavy is a {o}? | "
    "How tall is {p} {q}? | Who sang the song {w}? | Who played {p} in the movie {w}? | "
    "What is the plot of {w}? | What does the word {w} mean? | What is a {w}? | Who is {w}? | "
    "Where is {w}? | What is {w}? | Have you heard of {w}? | Tell me about {w} | How do I use {w}? | "
    "When was {w} invented? | What is the airport code of {c}? | Who is the CEO of {w}? | "
    "What did {p} say yesterday? | Who is the best football player? | How many stars are there? | "
    "How many {os} are in the world? | Why is {c} called {c}? | What is the tallest building in {c}? | "
    "Which {o} is the best in {n}? | Is {p} nice? | Do you know {p} {q}? | What is the time in {c}?"
)  # fmt: skip

_CHORES = piped(
    "Write a Python program that {vs} a {o}. | Write code to {v} a {o} | Write a function to {v} {os} | "
    "Write a program | Write some Python code | Write a web server in Go | Translate {o} into German. | "
    "Translate this to French: the {o} is here | How do you say {o} in Spanish? | "
    "Translate to English: {w} {w2} | Draw a {o}. | Draw me a picture of a {o} | Write a letter to {p}. | "
    "Write an email to my {j} | Send an email to {p} | Call {p} | Open the {o}. | Play some music | "
    "Set an alarm for {k} minutes | Book a flight to {c} | Order a {o} for me | Search the web for {os} | "
    "Google {w} | Summarize this article | Summarize this book: {w} | Fix this bug: {w} | Debug my code | "
    "Fix my code: x = {w}({k}) | Write SQL to select all {os} | Write a regex for {os} | "
    "Write an essay about {os}. | Plan a trip to {c}. | Write a song about a {o} for me and record it | "
    "Make a plan for my week | Write my homework | Prove the theorem of {w} | "
    "Solve this equation: {k}x + {m} = {y} | Integrate x^2 | Show me a picture of {c} | "
    "Generate an image of a {o} | Turn on the {o} | Buy a {o} | Write a business plan for a {o} shop | "
    "Write a novel | Explain this code: {w}({k}) | Write HTML for a page about {os} | "
    "Write a haiku in Japanese | Write a haiku about a {o} | Make a diagram of {os} | "
    "Write a rap about {os} | Write a C++ class for a {o} | Give me a workout plan | "
    "Create a recipe with {o} and {o2} | Write a contract | Remind me to {v} tomorrow | "
    "Make a table of {os} | Write a bash script that {vs} files | Implement quicksort | Write fizzbuzz | "
    "Write a sorting algorithm in Python | Review my code | Give me legal advice about a {o} | "
    "Write a speech about {os} | Tell me my future | Predict the weather in {c} | Play chess with me | "
    "Write a review of {w}"
)  # fmt: skip


def _slots(rng: Random) -> dict[str, object]:
    verb = rng.choice(VERBS)
    noun = rng.choice(ALL_NOUNS)
    return {
        "c": rng.choice(CITIES), "d": rng.choice(CITIES), "n": rng.choice(list(facts.CAPITALS)), "p": person(rng),
        "q": invent(rng).capitalize(),
        "o": noun, "os": plural(noun), "o2": rng.choice(ALL_NOUNS), "v": verb, "vs": plural(verb),
        "j": rng.choice(JOBS), "k": rng.randint(2, 500),
        "m": rng.randint(2, 20), "y": rng.randint(1400, 2030), "w": invent(rng, 2), "w2": invent(rng),
    }  # fmt: skip


def _modest(prompt: str, key: str, pool: tuple[str, ...], rng: Random) -> Sample:
    return ask(prompt, rng.choice(pool), key, Expect("has_any", _DO_NOT))


@task("unknown topic", 3.0)
def unknown_topic(rng: Random) -> Sample:
    first, second = rng.sample(_TOPICS, 2)
    prompt, _ = phrase(rng, _ABOUT, t=first, u=second)
    return _modest(fold(prompt, rng), first, UNKNOWN, rng)


@task("unknown world", 6.0)
def unknown_world(rng: Random) -> Sample:
    template = rng.choice(_WORLD)
    text = template.format(**_slots(rng))
    return _modest(fold(loosen(text, rng), rng), template if "{" in template else "!" + template, UNKNOWN, rng)


@task("unknown chore", 3.5)
def unknown_chore(rng: Random) -> Sample:
    template = rng.choice(_CHORES)
    text = template.format(**_slots(rng))
    return _modest(fold(loosen(text, rng), rng), template if "{" in template else "!" + template, CANNOT, rng)


_WITH_SENTENCE = piped(
    "{s} | {s} | Explain: {s} | What does this mean: {s} | Why? {s} | Is this true? {s} | {s} Why? | "
    "{s} What do you think? | How do I do this? {s} | I have a question. {s} | Translate into German: {s} | "
    "Summarize: {s} | Improve this text: {s} | {s} How does that work? | What is the meaning of: {s}"
)  # fmt: skip


@task("unknown text", 3.0)
def unknown_text(rng: Random) -> Sample:
    sentence = prose.sentence(rng)
    prompt = loosen(rng.choice(_WITH_SENTENCE), rng).format(s=sentence)
    return _modest(prompt, sentence.lower(), UNKNOWN, rng)


@task("unknown place", 2.0)
def unknown_place(rng: Random) -> Sample:
    """Known kinds of questions about things that do not exist."""
    name = invent(rng, rng.choice((2, 3))).capitalize()
    roll = rng.random()
    if roll < 0.5:
        forms = piped(
            "What is the capital of {c}? | What's the capital of {c}? | Capital of {c} | "
            "Which city is the capital of {c}? | Do you know the capital of {c}? | Tell me the capital of {c}"
        )  # fmt: skip
        prompt, _ = phrase(rng, forms, c=name)
        return ask(fold(prompt, rng), f"I do not know the capital of {name}.", name, Expect("has_all", ("not know",)))
    word = name.lower()
    if roll < 0.75:
        forms = ("What is the opposite of {c}?", "Opposite of {c}", "What's the opposite of {c}?")
        prompt, _ = phrase(rng, forms, c=word)
        return ask(prompt, f"I do not know the opposite of {word}.", word, Expect("has_all", ("not know",)))
    prompt, _ = phrase(
        rng, ("What color is a {c}?", "How many legs does a {c} have?", "What sound does a {c} make?"), c=word
    )
    return ask(prompt, f"I do not know what a {word} is.", word, Expect("has_all", ("not know",)))


@task("gibberish", 2.0)
def gibberish(rng: Random) -> Sample:
    roll = rng.random()
    if roll < 0.4:
        text = "".join(rng.choice("asdfghjklqwertzuiop") for _ in range(rng.randint(3, 14)))
    elif roll < 0.75:
        text = " ".join(invent(rng) for _ in range(rng.randint(1, 6)))
    elif roll < 0.85:
        text = rng.choice(
            ("?", "...", "!!!", "???", ".", "-", "#", ":)", "hm?", "&%$", "/", "0", "a", "x", "*", "^^", "\\")
        )
    else:
        text = " ".join(rng.choice(ALL_NOUNS) for _ in range(rng.randint(1, 4)))
    answer = "I am sorry, I did not understand that. Ask me what I can do."
    return ask(fold(text, rng), answer, text.lower(), Expect("has_any", ("understand",)))


_NAMED = piped(
    "Who is {p}? | Who is {p} {q}? | Do you know {p}? | What do you know about {p}? | Tell me about {p} | "
    "Where does {p} live? | How old is {p}?"
)


@task("unknown person", 1.5)
def unknown_person(rng: Random) -> Sample:
    name = rng.choice(NAMES) if rng.random() < 0.5 else invent(rng, 2).capitalize()
    prompt, _ = phrase(rng, _NAMED, p=name, q=invent(rng, 2).capitalize())
    return ask(prompt, f"I do not know who {name} is.", name.lower(), Expect("has_all", ("not know",)))

"""Tasks about numbers: arithmetic, comparing, sorting, counting on, unit conversion.

The ranges of numbers are those that a model of this size masters. Importing the module registers its tasks;
``tasks.py`` does so.
"""

from __future__ import annotations

from random import Random

from infra.demo_model.sample import Expect, Sample, ask, fold, loosen, phrase, task
from infra.demo_model.texts.lists import piped, split_words
from infra.demo_model.texts.words import NAMES, THINGS, plural

_SUMS = piped(
    "What is {q}? | What is {q}? | {q} | {q} = ? | {q}= | {q}=? | {q}? | Calculate {q}. | Compute {q} | "
    "How much is {q}? | What's {q}? | Solve {q} | {q} is what? | What does {q} equal? | "
    "What is the result of {q}? | Work out {q} | Do you know what {q} is? | {q} equals | Add it up: {q} | "
    "whats {q} | Evaluate: {q} | Give me the answer to {q} | Do the math: {q} | Can you calculate {q}?"
)  # fmt: skip


def _spaced(a: int, op: str, b: int, rng: Random) -> str:
    return f"{a}{op}{b}" if rng.random() < 0.25 else f"{a} {op} {b}"


def _operand(rng: Random) -> int:
    return rng.randint(0, rng.choice((10, 20, 100, 100, 100, 100, 999)))


def _sum_prompt(expression: str, rng: Random) -> str:
    return loosen(rng.choice(_SUMS), rng).format(q=expression)


def _number(value: int) -> Expect:
    return Expect("number", (str(value),))


_BARELY = piped(
    "Answer with just the number. | Only the number, please. | Just the number. | "
    "Reply with only the number. | Give only the number"
)
_SPELLED = split_words("zero one two three four five six seven eight nine ten eleven twelve")


def _calculated(prompt: str, shown: str, value: int, key: str, rng: Random) -> Sample:
    """A calculation; sometimes only its result is requested."""
    if rng.random() < 0.08:
        return ask(f"{prompt} {loosen(rng.choice(_BARELY), rng)}", str(value), key, _number(value))
    return ask(prompt, f"{shown} = {value}.", key, _number(value))


def _in_words(a: int, b: int, word: str, rng: Random) -> str | None:
    """The operands; small ones are sometimes written as words."""
    if max(a, b) > 12 or rng.random() > 0.12:
        return None
    return _sum_prompt(f"{_SPELLED[a]} {word} {_SPELLED[b]}", rng)


@task("add", 6.0)
def add(rng: Random) -> Sample:
    a, b = _operand(rng), _operand(rng)
    low, high = min(a, b), max(a, b)
    if rng.random() < 0.75:
        words = rng.choice(("+", "+", "+", "+", "plus"))
        prompt = _sum_prompt(_spaced(a, words, b, rng) if words == "+" else f"{a} plus {b}", rng)
    else:
        forms = piped(
            "Add {a} and {b}. | What is the sum of {a} and {b}? | Add {a} to {b} | Sum {a} and {b} | "
            "{a} and {b} together make? | If I add {a} and {b}, what do I get?"
        )  # fmt: skip
        prompt, _ = phrase(rng, forms, a=a, b=b)
    prompt = _in_words(a, b, "plus", rng) or prompt
    return _calculated(prompt, f"{a} + {b}", a + b, f"{low}+{high}", rng)


@task("subtract", 5.0)
def subtract(rng: Random) -> Sample:
    a, b = _operand(rng), _operand(rng)
    if rng.random() < 0.9:
        a, b = max(a, b), min(a, b)
    if rng.random() < 0.8:
        words = rng.choice(("-", "-", "-", "-", "minus"))
        prompt = _sum_prompt(_spaced(a, words, b, rng) if words == "-" else f"{a} minus {b}", rng)
    else:
        forms = piped(
            "Subtract {b} from {a}. | What is {b} less than {a}? | Take {b} away from {a} | "
            "What is the difference between {a} and {b}?"
        )  # fmt: skip
        prompt, _ = phrase(rng, forms, a=a, b=b)
    prompt = _in_words(a, b, "minus", rng) or prompt
    return _calculated(prompt, f"{a} - {b}", a - b, f"{a}-{b}", rng)


@task("multiply", 2.5, split_by="wording")
def multiply(rng: Random) -> Sample:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.1:
        a, b = rng.choice(((a, 10 * b), (10, rng.randint(10, 99)), (rng.randint(10, 99), 10)))
    sign = rng.choice(("*", "*", "x", "×", "times", "multiplied by"))
    template = rng.choice((*_SUMS, "Multiply {p}.", "What is the product of {p}?"))
    pair = f"{a}{sign}{b}" if sign in "*x×" and rng.random() < 0.25 else f"{a} {sign} {b}"
    prompt = loosen(template, rng).format(q=pair, p=f"{a} and {b}")
    return _calculated(prompt, f"{a} × {b}", a * b, f"{template}{sign}{a}*{b}", rng)


@task("multiply two digits", 1.5)
def multiply_wide(rng: Random) -> Sample:
    """Two-digit by one-digit multiplication, with tens and ones as an intermediate step."""
    a, b = rng.randint(13, 99), rng.randint(2, 9)
    sign = rng.choice(("*", "*", "x", "×", "times"))
    first, second = (a, b) if rng.random() < 0.7 else (b, a)
    prompt = _sum_prompt(f"{first} {sign} {second}", rng)
    return ask(prompt, f"{a} × {b} = {a // 10 * 10 * b} + {a % 10 * b} = {a * b}.", f"{a}*{b}", _number(a * b))


@task("too large", 1.5)
def too_large(rng: Random) -> Sample:
    """Numbers beyond the trained ranges: the answer says so instead of guessing."""
    if rng.random() < 0.5:
        pair, sign = (
            (rng.randint(1000, 10 ** rng.randint(4, 8)), rng.randint(2, 10 ** rng.randint(2, 8))),
            rng.choice("+-*/"),
        )
    else:
        pair, sign = (rng.randint(13, 999), rng.randint(13, 999)), rng.choice("*x×")
    if rng.random() < 0.15:
        pair, sign = (rng.randint(0, 99), rng.randint(0, 99)), rng.choice("+-*/")
        question = f"{pair[0]}.{rng.randint(1, 99)} {sign} {pair[1]}.{rng.randint(1, 99)}"
    else:
        question = _spaced(pair[0], sign, pair[1], rng)
    answer = "I am sorry, such a calculation is too hard for a model as small as me."
    return ask(_sum_prompt(question, rng), answer, question.replace(" ", ""), Expect("has_any", ("too hard",)))


@task("divide", 1.5, split_by="wording")
def divide(rng: Random) -> Sample:
    b, result = rng.randint(1, 12), rng.randint(0, 12)
    a = b * result
    if rng.random() < 0.25:
        a += rng.randrange(b)
    template = rng.choice((*_SUMS, "Divide {p}."))
    sign = rng.choice(("/", "/", "÷", "divided by"))
    pair = f"{a}{sign}{b}" if sign in "/÷" and rng.random() < 0.25 else f"{a} {sign} {b}"
    prompt = loosen(template, rng).format(q=pair, p=f"{a} by {b}")
    rest = a - b * result
    answer = f"{a} ÷ {b} = {result}" + (f" remainder {rest}." if rest else ".")
    return ask(prompt, answer, f"{template}{sign}{a}/{b}", _number(rest or result))


@task("add three", 1.5)
def add_three(rng: Random) -> Sample:
    a, b, c = (rng.randint(1, 30) for _ in range(3))
    if rng.random() < 0.7:
        prompt = _sum_prompt(f"{a} + {b} + {c}", rng)
    else:
        prompt, _ = phrase(rng, ("Add {a}, {b} and {c}.", "What is the sum of {a}, {b} and {c}?"), a=a, b=b, c=c)
    total = a + b + c
    return ask(prompt, f"{a} + {b} + {c} = {a + b} + {c} = {total}.", f"{a}+{b}+{c}", _number(total))


_MORE = (
    ("{n} has {a} {t}. {n} gets {b} more. How many {t} does {n} have now?", "+"),
    ("{n} has {a} {t} and buys {b} more. How many {t} does {n} have?", "+"),
    ("There are {a} {t} in a box. {n} adds {b}. How many {t} are there now?", "+"),
    ("{n} found {a} {t} in the morning and {b} in the evening. How many {t} in total?", "+"),
    ("I have {a} {t} and {n} gives me {b} more. How many {t} do I have?", "+"),
    ("If I have {a} {t} and you give me {b}, how many {t} do I have?", "+"),
    ("{n} has {a} {t}. {n} loses {b}. How many {t} are left?", "-"),
    ("{n} had {a} {t} and gave away {b}. How many {t} does {n} have left?", "-"),
    ("I have {a} {t} and I eat {b}. How many {t} do I have left?", "-"),
    ("There were {a} {t} on the table. {n} took {b}. How many {t} remain?", "-"),
    ("If I have {a} {t} and give {b} to {n}, how many {t} do I have left?", "-"),
    ("There are {a} boxes with {b} {t} each. How many {t} are there in total?", "*"),
    ("{n} has {a} bags with {b} {t} in each bag. How many {t} does {n} have?", "*"),
)  # fmt: skip


@task("word problem", 3.0)
def word_problem(rng: Random) -> Sample:
    template, op = rng.choice(_MORE)
    things = plural(rng.choice((*THINGS, "apple", "pear", "cookie", "orange", "lemon", "egg")))
    a, b = rng.randint(2, 50), rng.randint(1, 30)
    if op == "-":
        a, b = max(a, b) + 1, min(a, b)
    if op == "*":
        a, b = rng.randint(2, 10), rng.randint(2, 10)
    result = {"+": a + b, "-": a - b, "*": a * b}[op]
    prompt = loosen(template, rng).format(n=rng.choice(NAMES), t=things, a=a, b=b)
    shown = "×" if op == "*" else op
    return ask(prompt, f"{a} {shown} {b} = {result}, so the answer is {result} {things}.", f"{a}{op}{b}{things}",
               _number(result))  # fmt: skip


def _separator(rng: Random) -> str:
    return rng.choice((" ", ", ", ", ", ",", " "))


def _distinct_numbers(rng: Random, low: int, high: int) -> list[int]:
    top = rng.choice((9, 20, 50, 99, 99, 200))
    return rng.sample(range(top + 1), rng.randint(low, min(high, top)))


_SORT_UP = piped(
    "Sort these numbers: {l} | Sort {l} | Sort the numbers {l}. | Put these numbers in order: {l} | "
    "Order these numbers from smallest to largest: {l} | Sort these numbers in ascending order: {l} | "
    "Arrange {l} in ascending order. | Sort this list: {l} | Sort the following numbers: {l} | "
    "Order the numbers: {l} | Can you sort {l}? | Sort: {l} | Put {l} in order | Sort these: {l} | "
    "Sort the list [{l}] | Arrange these from low to high: {l}"
)  # fmt: skip
_SORT_DOWN = piped(
    "Sort these numbers in descending order: {l} | Order from largest to smallest: {l} | "
    "Sort {l} in reverse order | Sort from high to low: {l} | "
    "Sort these numbers from largest to smallest: {l} | Sort descending: {l} | "
    "Sort these numbers, largest first: {l} | Arrange {l} in descending order."
)  # fmt: skip


@task("sort numbers", 4.0)
def sort_numbers(rng: Random) -> Sample:
    numbers = _distinct_numbers(rng, 2, 7)
    down = rng.random() < 0.25
    prompt, _ = phrase(rng, _SORT_DOWN if down else _SORT_UP, l=_separator(rng).join(map(str, numbers)))
    ordered = sorted(numbers, reverse=down)
    return ask(prompt, ", ".join(map(str, ordered)), f"{down}{sorted(numbers)}")


@task("largest or smallest", 2.0)
def extreme(rng: Random) -> Sample:
    numbers = _distinct_numbers(rng, 2, 6)
    word, pick = rng.choice((("largest", max), ("biggest", max), ("smallest", min), ("highest", max), ("lowest", min)))
    forms = piped(
        "What is the {w} number in {l}? | Which of these numbers is the {w}: {l}? | Find the {w} of {l}. | "
        "Find the {w} number: {l} | Which number is the {w}? {l} | What is the {w} of these: {l}"
    )  # fmt: skip
    prompt, _ = phrase(rng, forms, w=word, l=_separator(rng).join(map(str, numbers)))
    value = pick(numbers)
    return ask(prompt, f"The {word} number is {value}.", f"{word}{sorted(numbers)}", _number(value))


@task("compare", 3.0)
def compare(rng: Random) -> Sample:
    a, b = _operand(rng), _operand(rng)
    if a == b:
        b = a + 1
    key = f"{min(a, b)}?{max(a, b)}"
    if rng.random() < 0.5:
        word, pick = rng.choice((("bigger", max), ("larger", max), ("greater", max), ("smaller", min), ("less", min)))
        forms = piped(
            "Which is {w}: {a} or {b}? | Which number is {w}, {a} or {b}? | What is {w}, {a} or {b}? | "
            "Which is {w}, {a} or {b}? | Compare {a} and {b}: which is {w}?"
        )  # fmt: skip
        prompt, _ = phrase(rng, forms, w=word, a=a, b=b)
        value = pick(a, b)
        other = a + b - value
        return ask(prompt, f"{value} is {word} than {other}.", key, Expect("starts", (f"{value} is",)))
    word, sign = rng.choice((("greater", 1), ("bigger", 1), ("larger", 1), ("more", 1), ("smaller", -1), ("less", -1)))
    forms = ("Is {a} {w} than {b}?", "Is {a} {w} than {b}? Yes or no?", "Is the number {a} {w} than {b}?")
    prompt, _ = phrase(rng, forms, a=a, w=word, b=b)
    true = (a - b) * sign > 0
    answer = f"Yes, {a} is {word} than {b}." if true else f"No, {a} is not {word} than {b}."
    return ask(prompt, answer, key, Expect("starts", ("yes" if true else "no",)))


@task("even or odd", 1.0)
def parity(rng: Random) -> Sample:
    n = rng.randint(0, 999)
    word = rng.choice(("even", "odd"))
    true = (n % 2 == 0) == (word == "even")
    kind = "even" if n % 2 == 0 else "odd"
    if rng.random() < 0.6:
        prompt, _ = phrase(rng, ("Is {n} {w}?", "Is {n} an {w} number?", "Is the number {n} {w}?"), n=n, w=word)
        answer = f"{'Yes' if true else 'No'}, {n} is {kind}."
    else:
        prompt, _ = phrase(rng, ("Is {n} even or odd?", "Even or odd: {n}", "Is {n} odd or even?"), n=n)
        answer = f"{n} is {kind}."
    return ask(prompt, answer, str(n))


@task("count on", 2.0)
def count_on(rng: Random) -> Sample:
    roll = rng.random()
    if roll < 0.35:
        n, step = rng.randint(0, 999), rng.choice((1, -1))
        word = "after" if step == 1 else "before"
        if n + step < 0:
            n = 1
        forms = piped(
            "What number comes {w} {n}? | Which number comes {w} {n}? | What comes {w} {n}? | "
            "What is the number {w} {n}?"
        )  # fmt: skip
        prompt, _ = phrase(rng, forms, w=word, n=n)
        return ask(prompt, f"{n + step} comes {word} {n}.", f"{word}{n}", Expect("starts", (f"{n + step} ",)))
    if roll < 0.7:
        low = rng.choice((1, 1, 1, 0, rng.randint(2, 90)))
        high = low + rng.randint(2, 11)
        forms = piped(
            "Count from {a} to {b}. | Count from {a} to {b} | List the numbers from {a} to {b}. | "
            "Write the numbers {a} to {b} | Count up from {a} to {b}"
        )  # fmt: skip
        shown = str(high)
        if low == 1:
            forms = (*forms, "Count to {b}.", "Can you count to {b}?", "Count to {b}")
            shown = _SPELLED[high] if rng.random() < 0.3 else shown
        prompt, _ = phrase(rng, forms, a=low, b=shown)
        return ask(prompt, ", ".join(map(str, range(low, high + 1))), f"{low}..{high}")
    start, step = rng.randint(0, 20), rng.choice((1, 2, 2, 3, 5, 10, 10))
    row = [start + step * i for i in range(4)]
    forms = piped(
        "What comes next: {l}? | What is the next number: {l} | Continue: {l} | Continue the sequence {l} | "
        "What number comes next? {l}, ..."
    )  # fmt: skip
    prompt, _ = phrase(rng, forms, l=", ".join(map(str, row)))
    value = row[-1] + step
    return ask(prompt, f"The next number is {value}.", f"{start}+{step}", _number(value))


#: (singular, plural, singular and plural of the other unit, factor, largest amount)
_UNITS = (
    ("meter", "meters", "centimeters", 100, 99), ("kilometer", "kilometers", "meters", 1000, 99),
    ("kilogram", "kilograms", "grams", 1000, 99), ("liter", "liters", "milliliters", 1000, 99),
    ("centimeter", "centimeters", "millimeters", 10, 99), ("hour", "hours", "minutes", 60, 12),
    ("minute", "minutes", "seconds", 60, 12), ("week", "weeks", "days", 7, 12), ("year", "years", "months", 12, 12),
    ("foot", "feet", "inches", 12, 12), ("dozen", "dozen", "pieces", 12, 12), ("day", "days", "hours", 24, 7),
    ("decade", "decades", "years", 10, 20), ("century", "centuries", "years", 100, 20),
    ("ton", "tons", "kilograms", 1000, 50),
    ("dollar", "dollars", "cents", 100, 99), ("euro", "euros", "cents", 100, 99),
)  # fmt: skip
_CONVERT = piped(
    "How many {o} are in {n} {u}? | Convert {n} {u} to {o}. | What is {n} {u} in {o}? | {n} {u} in {o} | "
    "How many {o} is {n} {u}? | How many {o} are there in {n} {u}? | {n} {u} to {o} | "
    "Convert {n} {u} into {o} | How many {o} in {n} {u}?"
)  # fmt: skip


@task("convert units", 2.5, split_by="wording")
def convert(rng: Random) -> Sample:
    one, many, other, factor, top = rng.choice(_UNITS)
    n = 1 if rng.random() < 0.2 else rng.randint(2, top)
    unit = one if n == 1 else many
    prompt, key = phrase(rng, _CONVERT, n=n, u=unit, o=other)
    if n == 1 and rng.random() < 0.5:
        prompt = prompt.replace(f"1 {unit}", f"{'an' if unit == 'hour' else 'a'} {unit}", 1)
    result = n * factor
    return ask(fold(prompt, rng), f"{n} {unit} is {result} {other}.", key, Expect("has_all", (str(result), other)))

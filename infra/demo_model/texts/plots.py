"""The plots of the little stories, as data.

``stories.py`` fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """The middle of a story, sentence by sentence, and its possible ends."""

    steps: tuple[tuple[str, ...], ...]
    ends: tuple[str, ...]


def _plot(text: str) -> Plot:
    """One step per paragraph and one wording per line; the last paragraph holds the ends."""
    paragraphs = [tuple(line.strip() for line in part.splitlines()) for part in text.strip().split("\n\n")]
    return Plot(tuple(paragraphs[:-1]), paragraphs[-1])


PLOTS = (
    _plot("""
One morning, {name} could not find {pos} {thing}.
One day, the {colour} {thing} of {name} was gone.

{He} looked under the bed and behind the door, but it was not there.
{He} looked in the {place}, but {he} did not see it.

{name} was very sad.
{name} sat down and began to cry.

Then {friend} the {other} came by. "Why are you sad?" asked {friend}.
"What is wrong?" asked {friend} the {other}.

"I lost my {thing}," said {name}.
"My {thing} is gone," said {name}.

They looked together, and soon they found the {thing} in the {place2}.
{friend} helped {him} look, and they found it near the {place2}.

{name} was happy and thanked {friend}. From that day on, they were best friends.
"Thank you!" said {name}. They laughed and went home together.
    """),
    _plot("""
One day, {name} saw a big storm over the {place}.
Suddenly, dark clouds came and it began to rain.

The wind was loud, and {name} was afraid.
{name} was cold and wet.

{He} ran and ran until {he} saw a small light.
Then {he} saw a little house with a light in the window.

It was the house of {friend}, an old {other}.
{friend} the {other} lived there.

"Come in," said {friend}. "You can stay here until the rain stops."
"You are safe here," said {friend}.

They ate some {food} and told each other stories.
{friend} gave {him} some {food} and a soft blanket.

In the morning the sun was shining again, and {name} walked home with a smile.
When the storm was over, they were good friends.
    """),
    _plot("""
One day, {name} found a {adj} {thing} in the {place}.
In the {place}, {name} saw something {colour}. It was a {thing}.

"Whose {thing} is this?" {name} asked.
{name} wanted to keep the {thing}, but it was not {poss}.

{He} asked everyone {he} met.
{He} asked the people in the village.

At last {he} met {friend} the {other}, who looked very worried.
Then {friend} the {other} came, looking for something.

"That is my {thing}!" said {friend}.
"You found my {thing}!" said {friend}.

{name} gave it back at once.
{name} was glad to give it back.

{friend} was so happy that {name} got a basket of {fruit}s. It is good to be honest.
"You are very kind," said {friend}, and they shared some {food}.
    """),
    _plot("""
{name} had a dream: {he} wanted to see the {place2}.
More than anything, {name} wanted to go to the {place2}.

But the way was long, and everyone said it was too far.
"It is too far for you," the others said.

{name} did not give up.
{name} packed a bag with {food} and a {thing}.

{He} walked over hills and through the {place}.
{He} walked for three days and three nights.

On the way {he} met {friend} the {other}, who wanted to come too.
A {other} named {friend} showed {him} the way.

At last they saw the {place2}, and it was beautiful.
Then, one evening, there it was: the {place2}.

{name} was proud and happy. Never give up on your dreams.
They sat down together and watched the sun go down.
    """),
    _plot("""
One day, {name} had a big bag of {fruit}s.
One day, {name} baked a cake with {fruit}s.

It was much too much for one {hero}.
It smelled very good.

{friend} the {other} came by and was very hungry.
Then {he} saw {friend}, a hungry {other}.

At first, {name} did not want to share.
{name} thought about it for a while.

Then {he} smiled and said, "Here, take some."
"Please sit down and eat with me," said {name}.

They ate together, and it tasted better than ever before.
They ate and laughed all afternoon.

From then on, {name} always shared with {pos} friends.
{name} learned that sharing makes you happy.
    """),
    _plot("""
One day, {name} wanted to learn how to {skill}.
{name} could not {skill}, and that made {him} sad.

{He} tried and tried, but it did not work.
The first time, {he} fell down.

"I will never learn it," {he} said.
{name} wanted to give up.

{friend} the {other} saw this and said, "Try again. I will help you."
"I could not do it at first either," said {friend} the {other}.

So they practiced every day in the {place}.
Every morning they went to the {place} and tried again.

Then, one day, {name} could {skill}!
After a week, it worked!

"I can do it!" {name} shouted, and everyone was proud.
{name} was very happy and thanked {friend}.
    """),
)  # fmt: skip

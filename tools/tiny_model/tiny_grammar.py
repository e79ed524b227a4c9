"""A grammar of small children's stories, the training text of the embedded model.

Everything here is our own text. A story is made in three steps: a plot is drawn, `_cast` draws who
and what it is about (a hero, a friend, a place, things), and `_expand` turns the plot's templates
into sentences. In a template `[a|b]` means one of both, may be nested, and `{name}` is a fact of
the cast; `{Name}` is the same with a capital letter. Since a story keeps one cast from its first to
its last sentence, names, pronouns, things and places stay the same all through it, which the model
has to learn.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tiny_plots import (
    CLOSINGS,
    INTRODUCTIONS,
    LEADS,
    LONG_PLOTS,
    SETTINGS,
    SHORT_PLOTS,
    TRAIT_LINES,
)
from tiny_words import (
    ANIMAL_HOMES,
    ANIMALS,
    COLORS,
    FOODS,
    HOBBIES,
    HUMAN_HOMES,
    LOOKS,
    NAMES,
    PEOPLE,
    PETS,
    PLACES,
    ROYAL_HOMES,
    SIZES,
    TOYS,
    TRAITS,
    TREASURES,
    words,
)

_CHOICE: Final = re.compile(r"\[([^\[\]]*)\]")
_FIELD: Final = re.compile(r"\{(\w+)\}")
_PRONOUNS: Final = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}

_OWN_LEADS: Final = {
    "puddle boat": ("One day, ", "One gray morning, ", "One afternoon, "),
    "moon": ("One night, ", "One warm night, ", "Late one night, "),
    "star": ("One night, ", "One summer night, ", "One evening, "),
    "dark night": ("One night, ", "One dark night, ", "Late one night, "),
    "snow": ("One winter morning, ", "One cold day, ", "One winter day, "),
}
# Who or what would make a plot silly: a frog that fears water, a doll thrown into a tree.
_BAD_HEROES: Final = {
    "afraid of water": {"duck", "frog"},
    "stuck in a tree": {"bird", "duck", "dragon"},
    "little bird": {"bird", "duck", "dragon"},
    "picnic": {"mouse"},
    "lost tooth": {"bird", "duck", "robot"},
}
_STRONG: Final = words("bear pony goat dragon robot dog")
_FRIENDS: Final = {
    "stuck in a tree": _STRONG,
    "little bird": _STRONG,
    "picnic": tuple(kind for kind in ANIMALS if kind != "mouse"),
    "lost tooth": words("cat dog rabbit fox bear mouse dragon goat"),
}
# Places with trees and butterflies.
_GREEN: Final = ("the park", "the forest", "the garden", "the meadow", "the hill")
_PLACES: Final = {
    "stuck in a tree": _GREEN,
    "little bird": _GREEN,
    "lost way": _GREEN,
    "kite": ("the beach", "the hill", "the meadow", "the park"),
}
_TOYS: Final = {
    "stuck in a tree": ("ball", "kite", "balloon"),
    "broken cup": ("ball", "car", "balloon", "train"),
}
_SYLLABLES: Final = words(
    "ba be bo da do fi ga ha jo ka ke li lo ma mi na no pa ra ri sa so ta vi wa zu"
)
_ENDS: Final = words("n r l s x m th ck")


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _new_name(rng: random.Random) -> str:
    """Make up a name that is in no list: the model must learn to copy names."""
    syllables = rng.choices(_SYLLABLES, k=rng.choice((1, 2, 2, 3)))
    return ("".join(syllables) + rng.choice(_ENDS)).capitalize()


@dataclass(frozen=True)
class _Character:
    """Somebody in a story: how he or she is introduced, and named after that."""

    species: str
    intro: str
    short: str
    named: bool
    pronoun: str


def _character(
    rng: random.Random, animals: tuple[str, ...], pronoun: str, *, other: str = ""
) -> _Character:
    """Draw a person or an animal which is not of the species of the other one."""
    if rng.random() < 0.45:
        species = rng.choice(PEOPLE[pronoun])
        name = rng.choice(NAMES[pronoun])
        if rng.random() < 0.1:
            name = _new_name(rng)
        described = f"{rng.choice(SIZES)} {species}"
        if rng.random() < 0.2:
            described = species
    else:
        species = rng.choice([kind for kind in animals if kind != other])
        name = rng.choice(PETS[pronoun])
        described = f"{rng.choice(LOOKS)} {species}"
        if rng.random() < 0.4:
            return _Character(species, _article(described), f"the {species}", False, pronoun)
    named = rng.choice(("named", "called"))
    return _Character(species, f"{_article(described)} {named} {name}", name, True, pronoun)


def _family(species: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the relatives that a hero may have, and the homes."""
    if species in ("prince", "princess"):
        return words("mother father"), ROYAL_HOMES
    if species in ANIMALS:
        return words("mother father"), ANIMAL_HOMES
    return words("mom dad grandma grandpa"), HUMAN_HOMES


def _cast(rng: random.Random, plot: str) -> dict[str, str]:
    """Draw the facts of one story, by the names that the templates use."""
    # Hero and friend differ in pronoun, so that "he" and "she" always say who is meant.
    pronoun, other_pronoun = rng.choice((("he", "she"), ("she", "he")))
    heroes = tuple(kind for kind in ANIMALS if kind not in _BAD_HEROES.get(plot, ()))
    friends = _FRIENDS.get(plot, ANIMALS)
    hero = _character(rng, heroes, pronoun)
    friend = _character(rng, friends, other_pronoun, other=hero.species)
    while friend.short == hero.short:
        friend = _character(rng, friends, other_pronoun, other=hero.species)
    family, homes = _family(hero.species)
    fitting = _PLACES.get(plot)
    place = rng.choice([p for p in PLACES if fitting is None or p.name in fitting])
    spots = rng.sample(place.spots, 3)
    colors = rng.sample(COLORS, 3)
    toy = rng.choice(_TOYS.get(plot, TOYS))
    treasure = rng.choice(TREASURES)
    food = rng.choice(FOODS)
    described = hero.intro.split(" ", 1)[1]
    he, him, his, himself = _PRONOUNS[hero.pronoun]
    fhe, fhim, fhis, _ = _PRONOUNS[friend.pronoun]
    return {
        "intro": hero.intro,
        "hero": hero.short,
        "hero_s": f"{hero.short}'s",
        "hero_call": hero.short if hero.named else f"little {hero.species}",
        "callback": hero.short if hero.named else "my friend",
        "opener": hero.short if hero.named else rng.choice((hero.short, f"the {described}")),
        "he": he,
        "him": him,
        "his": his,
        "himself": himself,
        "a_friend": friend.intro,
        "friend": friend.short,
        "call": friend.short if friend.named else "my friend",
        "my_name": f"My name is {friend.short}" if friend.named else f"I am {friend.intro}",
        "fhe": fhe,
        "fhim": fhim,
        "fhis": fhis,
        "parent": rng.choice(family),
        "home": rng.choice(homes),
        "trait": rng.choice(TRAITS),
        "hobby": rng.choice(HOBBIES),
        "to_place": place.to,
        "at_place": place.at,
        "spot1": spots[0],
        "spot2": spots[1],
        "spot3": spots[2],
        "sight": place.sight,
        "color": colors[0],
        "toy": toy,
        "a_toy": _article(f"{colors[0]} {toy}"),
        "a_toy_plain": _article(toy),
        "treasure": treasure,
        "a_treasure": _article(f"{colors[1]} {treasure}"),
        "a_color": _article(colors[2]),
        "flying": rng.choice(("bird", "butterfly", "bee")),
        "food": food,
        "a_food": _article(food),
    }


def _expand(template: str, cast: dict[str, str], rng: random.Random) -> str:
    """Choose among the alternatives, innermost first, then fill in the facts.

    Alternatives outside of any bracket are alternatives of the whole template.
    """

    def fact(match: re.Match[str]) -> str:
        name = match[1]
        if name in cast:
            return cast[name]
        value = cast[name[0].lower() + name[1:]]
        return value[0].upper() + value[1:]

    text, open_choices = f"[{template}]", 1
    while open_choices:
        text, open_choices = _CHOICE.subn(lambda match: rng.choice(match[1].split("|")), text)
    text = " ".join(_FIELD.sub(fact, text).split()).replace(" .", ".")
    return text[:1].upper() + text[1:]


def _opening(plot: str, cast: dict[str, str], rng: random.Random) -> list[str]:
    """Draw the templates before a plot, and decide on its `lead` and the hero's `first` mention."""
    cast["lead"], cast["first"] = rng.choice(_OWN_LEADS.get(plot, LEADS)), cast["hero"]
    kind = rng.random()
    if kind < 0.6:
        introduction = rng.choice(INTRODUCTIONS)
        told = set(_FIELD.findall(introduction)) & {"home", "trait", "hobby"}
        lines = [line for line in TRAIT_LINES if not told & set(_FIELD.findall(line))]
        return [introduction, *rng.sample(lines, rng.choice((0, 1, 1)))]
    if kind < 0.8:
        cast["first"] = rng.choice((cast["intro"], cast["opener"]))
        return []
    cast["lead"], cast["first"] = "", cast["opener"]
    if kind < 0.92 or plot in _OWN_LEADS:
        return []
    return [rng.choice(SETTINGS)]


def story(rng: random.Random) -> str:
    """Write one story, a paragraph of plain ASCII English; the state of `rng` determines it."""
    plots = rng.choice((SHORT_PLOTS, SHORT_PLOTS, LONG_PLOTS))
    plot = rng.choice(list(plots))
    cast = _cast(rng, plot)
    templates = [*_opening(plot, cast, rng), *plots[plot], rng.choice(CLOSINGS)]
    return " ".join(filter(None, (_expand(template, cast, rng) for template in templates)))


def stories(seed: int) -> Iterator[str]:
    """Yield stories without end, the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        yield story(rng)

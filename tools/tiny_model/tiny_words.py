"""The words of the stories: names, animals, things, homes and places."""

from dataclasses import dataclass
from typing import Final


def words(text: str) -> tuple[str, ...]:
    """Split a line into words."""
    return tuple(text.split())


PEOPLE: Final = {"she": ("girl", "girl", "girl", "princess"), "he": ("boy", "boy", "boy", "prince")}
NAMES: Final = {
    "she": words("Lily Mia Anna Emma Lucy Sara Zoe Rosie Ella Nina Alice Maya Kate Sophie"),
    "he": words("Tom Ben Max Sam Tim Jack Leo Finn Oscar Peter Noah Theo Paul Bob"),
}
PETS: Final = {
    "she": words("Mimi Coco Ruby Daisy Luna Fluffy Pepper Kiki"),
    "he": words("Pip Bobo Toby Bruno Rex Otto Momo Spot"),
}
ANIMALS: Final = words("cat dog rabbit fox bear mouse bird duck frog pony goat pig dragon robot")
SIZES: Final = ("little", "small", "young")
COLORS: Final = words("red blue green yellow brown white black golden pink purple")
LOOKS: Final = words("little small young big funny brown white black gray")
TRAITS: Final = words("kind curious happy gentle clever friendly cheerful playful")
TOYS: Final = words("ball kite doll car boat drum balloon train")
TREASURES: Final = words("key ring coin bell scarf hat cup feather box book")
FOODS: Final = words("apple cookie pie banana sandwich pear carrot cake orange muffin")
HOBBIES: Final = (
    "sing",
    "dance",
    "run",
    "play outside",
    "look at the clouds",
    "read books",
    "climb trees",
    "pick flowers",
    "help others",
    "tell stories",
    "jump and run",
    "play with friends",
)
HUMAN_HOMES: Final[tuple[str, ...]] = (
    "a small house",
    "a little village",
    "a red house",
    "a big town",
    "a house by the river",
    "a white house on a hill",
)
ANIMAL_HOMES: Final[tuple[str, ...]] = (
    "a cozy hole under an old tree",
    "a small cave",
    "a little house in the woods",
    "a warm barn",
    "a tiny house by the river",
    "an old garden",
)

ROYAL_HOMES: Final[tuple[str, ...]] = ("a castle", "a big castle", "an old castle on a hill")


@dataclass(frozen=True)
class Place:
    """A place, how one goes there and is there, where things may lie, and what one sees."""

    name: str
    to: str
    at: str
    spots: tuple[str, ...]
    sight: str


PLACES: Final = (
    Place(
        "the park",
        "to the park",
        "in the park",
        ("under the bench", "behind a big tree", "near the pond", "next to the slide"),
        "the ducks on the pond",
    ),
    Place(
        "the forest",
        "to the forest",
        "in the forest",
        ("behind a tall tree", "under a bush", "next to an old log", "under the leaves"),
        "the tall trees",
    ),
    Place(
        "the beach",
        "to the beach",
        "at the beach",
        ("in the sand", "behind a rock", "near the water", "under an old boat"),
        "the big waves",
    ),
    Place(
        "the garden",
        "to the garden",
        "in the garden",
        ("under the roses", "behind the wall", "near the gate", "between the flowers"),
        "the pretty flowers",
    ),
    Place(
        "the farm",
        "to the farm",
        "on the farm",
        ("behind the barn", "in the hay", "near the fence", "under the cart"),
        "the cows and the sheep",
    ),
    Place(
        "the hill",
        "up the hill",
        "on the hill",
        ("behind a stone", "in the long grass", "under a small tree", "near the path"),
        "the clouds in the sky",
    ),
    Place(
        "the lake",
        "to the lake",
        "at the lake",
        ("near the water", "behind a rock", "under the bridge", "in the long grass"),
        "the fish in the water",
    ),
    Place(
        "the meadow",
        "to the meadow",
        "in the meadow",
        ("in the long grass", "between the flowers", "behind a bush", "next to a stone"),
        "the butterflies",
    ),
    Place(
        "the market",
        "to the market",
        "at the market",
        ("under a table", "behind a cart", "next to a basket", "near the well"),
        "the apples and the bread",
    ),
    Place(
        "the river",
        "to the river",
        "by the river",
        ("under the bridge", "behind a rock", "near the water", "under a bush"),
        "the little fish",
    ),
)

# What may stand before a hero who has not been introduced, instead of a lead.

"""Drawings of coloured shapes, and questions about them with their answers: what the model `shapes`
is trained on and tested with. Drawing needs Pillow.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from PIL import Image

KINDS: Final = ("circle", "square", "triangle")
COLOURS: Final = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 87, 200),
    "yellow": (245, 200, 30),
}
SIDE: Final = 48
MAX_SHAPES: Final = 4
_BACKGROUND = (255, 255, 255)
_RADII = (5, 7)
_GAP = 2
_NUMBERS = ("zero", "one", "two", "three", "four")
_SKEWS = ((1, 1, 1), (6, 1, 1), (1, 6, 1), (1, 1, 6))


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a drawing: its kind, its colour, and its bounding square by centre and radius."""

    kind: str
    colour: str
    x: int
    y: int
    radius: int


@dataclass(frozen=True, slots=True)
class Question:
    """Question about one drawing or two, with the answer that the model should give.

    Attributes:
        kind: "count", "colour", "presence", "description" or "comparison".
    """

    kind: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """Drawing of up to `MAX_SHAPES` shapes that do not overlap, on a white background."""

    shapes: tuple[Shape, ...]

    def image(self) -> "Image.Image":
        """Returns the drawing as an image of Pillow, `SIDE` pixels high and wide."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (SIDE, SIDE), _BACKGROUND)
        canvas = ImageDraw.Draw(image)
        for shape in self.shapes:
            x, y, r, fill = shape.x, shape.y, shape.radius, COLOURS[shape.colour]
            match shape.kind:
                case "circle":
                    canvas.ellipse((x - r, y - r, x + r, y + r), fill)
                case "square":
                    canvas.rectangle((x - r, y - r, x + r, y + r), fill)
                case _:
                    canvas.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill)
        return image

    def count(self, kind: str) -> int:
        """Returns the number of shapes of a kind."""
        return sum(shape.kind == kind for shape in self.shapes)

    @property
    def description(self) -> str:
        """All shapes in words, such as "two red circles and a blue square"."""
        groups = Counter((s.kind, s.colour) for s in self.shapes)
        order = [(kind, colour) for kind in KINDS for colour in COLOURS]
        phrases = [_phrase(groups[each], *each) for each in order if each in groups]
        return " and ".join([", ".join(phrases[:-1]), phrases[-1]] if phrases[1:] else phrases)


def random_drawing(source: random.Random) -> Drawing:
    """Returns a drawing of one to `MAX_SHAPES` shapes, often several of one kind."""
    number = source.randint(1, MAX_SHAPES)
    kinds = source.choices(KINDS, source.choice(_SKEWS), k=number)
    shapes: list[Shape] = []
    while len(shapes) < number:
        radius = source.randint(*_RADII)
        x, y = (source.randint(radius + 1, SIDE - radius - 2) for _ in range(2))
        if all(max(abs(x - s.x), abs(y - s.y)) > radius + s.radius + _GAP for s in shapes):
            colour = source.choice(list(COLOURS))
            shapes.append(Shape(kinds[len(shapes)], colour, x, y, radius))
    return Drawing(tuple(shapes))


def held_out(number: int) -> tuple[Drawing, Drawing]:
    """Returns the pair of this number of drawings that the model is not trained on."""
    source = random.Random(f"held out {number}")  # noqa: S311
    return random_drawing(source), random_drawing(source)


def questions(drawing: Drawing) -> list[Question]:
    """Returns the questions about one drawing, kind by kind."""
    return [*_counts(drawing), *_colours(drawing), *_presences(drawing), *_descriptions(drawing)]


def comparisons(first: Drawing, second: Drawing) -> list[Question]:
    """Returns the questions that compare two drawings."""
    return [
        Question("comparison", f"Which picture has more {kind}s?", _more(*counts))
        for kind in KINDS
        if any(counts := (first.count(kind), second.count(kind)))
    ]


def messages(question: str, num_images: int = 1) -> list[dict[str, object]]:
    """Returns a chat of one question about so many images, as the model's chat template takes."""
    images: Sequence[dict[str, str]] = [{"type": "image"}] * num_images
    return [{"role": "user", "content": [*images, {"type": "text", "text": question}]}]


def _counts(drawing: Drawing) -> Iterator[Question]:
    for kind in KINDS:
        yield Question("count", f"How many {kind}s?", _NUMBERS[drawing.count(kind)])
    yield Question("count", "How many shapes?", _NUMBERS[len(drawing.shapes)])


def _colours(drawing: Drawing) -> Iterator[Question]:
    for shape in drawing.shapes:
        if drawing.count(shape.kind) == 1:
            yield Question("colour", f"What colour is the {shape.kind}?", shape.colour)


def _presences(drawing: Drawing) -> Iterator[Question]:
    for kind in KINDS:
        answer = "yes" if drawing.count(kind) else "no"
        yield Question("presence", f"Is there a {kind}?", answer)


def _descriptions(drawing: Drawing) -> Iterator[Question]:
    yield Question("description", "Describe the picture.", drawing.description)


def _more(first: int, second: int) -> str:
    if first == second:
        return "neither"
    return "the first" if first > second else "the second"


def _phrase(number: int, kind: str, colour: str) -> str:
    return f"a {colour} {kind}" if number == 1 else f"{_NUMBERS[number]} {colour} {kind}s"

"""RGB images, as models see them. Needs Pillow."""

from PIL import Image

# Bits of a sample of a Pillow image.
_BITS = 8
# Bits of a sample in the file, by the raw modes of PNG in which Pillow compares the transparent
# colour of the file with pixels that it has scaled.
_SAMPLE_BITS = {"L;2": 2, "L;4": 4, "I;16B": 16, "RGB;16B": 16}


def rgb(image: Image.Image) -> Image.Image:
    """Returns an image as RGB, on white where it is transparent. What viewers do not show is not
    shown to the model."""
    scale_transparent_colour(image)
    if image.mode.startswith("I;16"):
        info = image.info
        image = image.point(lambda value: value * (1 / 256)).convert("L")
        image.info = info
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode != "RGBA":
        image = image.convert("RGBA")  # a copy even of an image that is RGBA
    ground = Image.new("RGB", image.size, "white")
    ground.paste(image, mask=image)
    return ground


def scale_transparent_colour(image: Image.Image) -> None:
    """Scales the transparent colour of a file to the 8 bits of its pixels, in place. Only before
    the image is loaded; later it changes nothing. Colours of 16 bits are the same if their upper 8
    bits are."""
    colour = image.info.get("transparency")
    tiles = getattr(image, "tile", None)  # none of an image that was not read from a file
    if colour is None or not tiles or tiles[0][3] not in _SAMPLE_BITS:
        return
    bits = _SAMPLE_BITS[tiles[0][3]]
    if isinstance(colour, tuple):
        image.info["transparency"] = tuple(_scaled(value, bits) for value in colour)
    else:
        image.info["transparency"] = _scaled(colour, bits)


def _scaled(sample: int, bits: int) -> int:
    most = 2**bits - 1
    return sample >> bits - _BITS if bits > _BITS else (sample & most) * (2**_BITS - 1) // most

from enum import Enum

from absent import absent

__getattr__ = absent(__name__)


class InterpolationMode(Enum):
    """The names that modules use as defaults."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"

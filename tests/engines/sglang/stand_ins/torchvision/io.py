from enum import Enum

from absent import absent

__getattr__ = absent(__name__)


class ImageReadMode(Enum):
    RGB = "RGB"

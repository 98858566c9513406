from absent import absent

from torchvision.transforms import InterpolationMode as InterpolationMode

__getattr__ = absent(__name__)

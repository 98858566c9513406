"""So that SGLang's and transformers' modules for images can be imported; nothing in here works on an image."""

from absent import absent

__version__ = "0.28.0"
__getattr__ = absent(__name__)

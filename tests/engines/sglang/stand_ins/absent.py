"""What a stand-in says about the names that it leaves out."""

from collections.abc import Callable
from typing import NoReturn


def absent(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """A `__getattr__` for `module`: every other name can be imported, and raises NotImplementedError when called."""

    def __getattr__(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def fail(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"{module}.{name} has no stand-in: write one in tests/engines/sglang/stand_ins")

        return fail

    return __getattr__

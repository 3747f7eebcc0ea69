"""Checks of configurations, before any compute."""

import dataclasses
import math
from typing import Any


def require(condition: bool, message: str) -> None:
    """Raise a ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_finite(config: Any, prefix: str = "") -> None:
    """Raise a ValueError where a field of a dataclass, or a number of a tuple in it, is not finite.

    `prefix` is what the error puts before the field's name, such as "optimizer.".
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        numbers = value if isinstance(value, tuple) else (value,)
        for x in numbers:
            finite = not isinstance(x, float) or math.isfinite(x)
            require(finite, f"{prefix}{field.name}={value}: must be finite, not nan or infinity")

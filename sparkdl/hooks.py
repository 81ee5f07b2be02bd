"""What all classes whose methods are called during a fit have in common."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar


class Hooks:
    """Base of callbacks; each kind says where it is called, and through which methods.

    A method that looks like a hook but would never be called is refused at class definition.

    Attributes:
        kind: what such callbacks are called in messages.
        methods: their names.
    """

    kind: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **options: Any) -> None:
        """Check a class as it is defined.

        Raises:
            TypeError: it has a method that would never be called, or is of two kinds.
        """
        super().__init_subclass__(**options)
        kinds = {vars(base)["kind"] for base in cls.__mro__ if "kind" in vars(base)}
        if len(kinds) > 1:
            raise TypeError(
                f"{cls.__name__} is called in the driver and on workers, which have copies of it: "
                "they would not share attributes. Write one class for each"
            )
        for name, value in vars(cls).items():
            seems_called = name.startswith(("on_", "before_", "after_"))
            if seems_called and inspect.isfunction(value) and name not in cls.methods:
                raise TypeError(
                    f"{cls.__name__}.{name} would never be called: {cls.kind} are called by "
                    f"{', '.join(cls.methods)}"
                )

"""Quantities of a recipe as its models read them, and as a file has them."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, SerializationInfo, ValidationInfo

from fenno import units
from fenno.errors import FennoError, UsageError

# The context of pydantic in which a recipe is a file's text; elsewhere a latency is a number of seconds.
FILE = "file"


def _read(parse: Any) -> Any:
    """A pydantic validator from one of `units`' functions; numbers pass through the same door as text."""

    def validate(value: object) -> object:
        try:
            return value if value is None else parse(value)
        except FennoError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(validate, json_schema_input_type=str | float | int)


def _bytes(parse: Callable[[object], float], over: float, *units_meant: str) -> Callable[[object], float]:
    """A reader of `units` that refuses less than 1 MiB, where it is `over` what is no bytes: most often a forgotten unit."""

    def read(value: object) -> float:
        found, text = parse(value), str(value).strip()
        if over < found < 2**20:
            bare = text.replace(".", "").isdigit()
            meant = " or ".join(f"{text}{unit}" for unit in units_meant)
            raise UsageError(f"{text} has no unit: write {meant}" if bare else f"{text} is less than 1 MiB")
        return found

    return read


def _unit_named(value: object, info: ValidationInfo) -> object:
    """A latency in a file needs its unit: 800 is rarely meant as seconds."""
    if info.context == FILE and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        raise ValueError(f"{value:g} has no unit: write {value:g}ms or {value:g}s")
    return value


def _unit_written(seconds: float, info: SerializationInfo) -> float | str:
    # Without an exponent, which `units` does not read.
    return f"{Decimal(repr(seconds)):f}s" if info.context == FILE else seconds


Seconds = Annotated[float, _read(units.duration)]
Share = Annotated[float, _read(units.share)]
Memory = Annotated[float, _read(_bytes(units.memory, 1, "%", "GiB"))]
Size = Annotated[int, _read(_bytes(units.size, 0, "GiB"))]
Count = Annotated[int, _read(units.count)]
Rate = Annotated[float, Field(gt=0)]
Limit = Annotated[float, Field(gt=0), _read(units.duration)]
# A validator that stands last is called first.
_UNIT = BeforeValidator(_unit_named, json_schema_input_type=str)
LatencyLimit = Annotated[float, Field(gt=0), _read(units.duration), _UNIT, PlainSerializer(_unit_written)]

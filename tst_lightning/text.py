"""How numbers and errors are written for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def count(number: float) -> str:
    """A count in three digits and a unit: 512, 6.14k, 24.6M, 75.5B, 1.05T."""
    for unit in ("", "k", "M", "B", "T"):
        # 999.5 would print as 1e+03: the next unit takes over there
        if abs(number) < 999.5 or unit == "T":
            return f"{number:.3g}{unit}" if unit or number != int(number) else f"{int(number)}"
        number /= 1000
    raise AssertionError("unreachable")


def one_of(numbers: Sequence[int], shown: int = 12) -> str:
    """A choice of numbers in words."""
    listed = ", ".join(map(str, numbers[:shown])) + (", ..." if len(numbers) > shown else "")
    return f"one of {listed}" if len(numbers) > 1 else listed


def either(ways: Iterable[str]) -> str:
    """Ways out in words."""
    *most, last = ways
    return f"{', '.join(most)} or {last}" if most else last

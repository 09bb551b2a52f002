"""The nearest value that divides, or is divided; what errors propose."""

from math import isqrt


def nearest_multiple(value: int, divisor: int) -> int:
    """The positive multiple of `divisor` nearest to `value`."""
    return max(1, round(value / divisor)) * divisor


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending, in the time of its square root."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor * divisor != number]
    return small + large


def nearest_divisor(value: int, number: int) -> int:
    """The divisor of `number` nearest to `value`, the smaller of two."""
    return min(divisors(number), key=lambda divisor: (abs(divisor - value), divisor))

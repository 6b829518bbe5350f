"""Values that would work, for the ends of messages."""


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def hint(flag: str, values: list[int]) -> str:
    """ "; --flag 1 or 2 would do" with the largest of `values`, or nothing when there are none."""
    return f"; {flag} {' or '.join(str(value) for value in values[-6:])} would do" if values else ""

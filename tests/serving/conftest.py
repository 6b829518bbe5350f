"""What the tests of the owner share."""

from tests.support.processes.owned_engines import make_owner

__all__ = ["make_owner"]

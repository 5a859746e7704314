"""What a short whole run needs, as in tests/train."""

from tests.train.conftest import data, settings, small_model

__all__ = ["data", "settings", "small_model"]

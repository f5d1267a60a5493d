"""What tests of scores share."""

import pytest
import toy_backend

from jflash.backends import registry


@pytest.fixture
def toy():
    """The backend "toy", which has kernels' protocol and none of their limits."""
    with registry.registered(toy_backend.BACKEND):
        yield

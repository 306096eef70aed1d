"""Commands set up logging for their whole process, which here is the tests' own."""

import pytest


@pytest.fixture(autouse=True)
def no_traces(logging_as_it_was: None) -> None:
    """Every test of a command leaves logging as it was."""

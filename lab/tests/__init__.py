"""Tests of the lab: `python -m unittest discover -t . lab/tests`, with what `make lab` installs."""

import os
import unittest
from collections.abc import Callable


def needs(is_there: object, what: str) -> Callable:
    """Passes over a test that needs what is not there; where all is installed (`ASHLAR_CI=1`) it
    fails without."""
    return unittest.skipUnless(is_there or os.environ.get("ASHLAR_CI") == "1", what)

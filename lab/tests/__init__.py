"""Tests of the lab: `python -m unittest discover -t . lab/tests`, with what `make lab` installs."""

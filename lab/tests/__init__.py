"""Tests of the lab: `python -m unittest discover -t . lab/tests`, with the libraries of `make lab`."""

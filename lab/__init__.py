"""The lab: storage studies, rerun on any machine against what it has, with nothing hidden."""

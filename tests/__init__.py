"""Black box: the release binary, driven as an operator does, with clients nobody here wrote."""

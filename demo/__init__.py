"""The demo: a real virtual machine whose PostgreSQL keeps its data on an Ashlar volume.

`guest_image.py` and `vm.py` know nothing of the demo; the black-box tests use them too.
"""

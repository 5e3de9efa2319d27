"""Where things are: the checkout, the studies, what is kept between runs, and programs."""

import os
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
STUDIES = Path(__file__).parent / "studies"


def cache() -> Path:
    """For drive files, guests, and the ledger."""
    return Path(os.environ.get("ASHLAR_CACHE") or CHECKOUT / ".cache").resolve()


def study_file(name: str) -> Path:
    """Of a study by its name, or a TOML file of somebody's own."""
    path = Path(name)
    return path if path.suffix == ".toml" else STUDIES / f"{name}.toml"


def existing(path: Path) -> Path:
    """The nearest that is there: what is made will be on its disk."""
    while not path.exists():
        path = path.parent
    return path


def programs() -> str:
    """A PATH that has sbin, as that of root may not."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

"""The contenders: each is a `side.Side`, in a file of its own."""

from importlib import import_module
from pathlib import Path

from lab import study as studies
from lab.place import Place
from lab.side import Drive, Side

__all__ = ["Drive", "Side", "make"]

MADE_BY = {
    "ashlar": ("lab.sides.ashlar", "Ashlar"),
    "mdraid": ("lab.sides.mdraid", "Mdraid"),
    "raw": ("lab.sides.raw", "made"),
    "btrfs": ("lab.sides.btrfs", "Btrfs"),
    "zfs": ("lab.sides.zfs", "Zfs"),
    "qemu-storage-daemon": ("lab.sides.qsd", "StorageDaemon"),
    "spdk": ("lab.sides.spdk", "Spdk"),
}


def make(chosen: studies.Side, study: studies.Study, place: Place, work: Path) -> Side:
    """`work` is a directory in `place` for what the side needs besides its drives."""
    module, name = MADE_BY[chosen.kind]
    return getattr(import_module(module), name)(chosen, study, place, work)

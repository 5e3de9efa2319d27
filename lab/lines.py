"""Files that grow by a line. The last one may be torn: by a crash, or as a disk was full."""

import os
from pathlib import Path


def whole(path: Path) -> list[str]:
    """All that were written to their end; none if there is no such file."""
    text = path.read_bytes() if path.exists() else b""
    return text[: text.rfind(b"\n") + 1].decode().splitlines()


def append(path: Path, line: str) -> None:
    """On disk when it returns. What is torn is cut off: with an end, it might mean anything."""
    with open(path, "a+b") as file:
        if size := file.tell():
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())

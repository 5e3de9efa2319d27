"""Which reads memory answered, and not drives. Pure: from what was counted to sentences.

fio asks for no cache, and a file system may answer from one all the same: btrfs and ZFS do. What
arrays are asked is counted beneath every cache. A side that does not count it has what its drives
were asked in its place: a rebuild's reads are among these, and those that a write of a part of a
stripe begins with, so more may have been of memory than is told, and never less.
"""

from lab.report.source import Source
from lab.results import Cell
from lab.stats import Summary

READS_ENOUGH = 0.01  # of the array, for an operation that only reads
SHARE_MAX = 0.1  # of what fio read, that memory may have answered
BLURRED_SECONDS = 0.5  # of older runs: looks were a second apart, and those in the middle blur most


def array_reads(cell: Cell) -> int | None:
    return cell.array_drive_reads if cell.array_reads is None else cell.array_reads


def array_read_bytes(cell: Cell) -> int | None:
    return cell.array_drive_read_bytes if cell.array_read_bytes is None else cell.array_read_bytes


def asked_bytes(source: Source, cell: Cell) -> float:
    """That fio read. What PostgreSQL has in its buffers it does not ask for: of that, none."""
    pattern = source.pattern(cell.load)
    return cell.operations * pattern.block * pattern.read_share if pattern else 0.0


def share(source: Source, one: Summary) -> float | None:
    """Of what fio read, memory answered so much, in the median of the repeats; None if it read
    nothing, or if nobody counted."""
    found = one.spread(lambda each: share_of(source, each.cell))
    return found.median if found else None


def share_of(source: Source, cell: Cell) -> float | None:
    asked, read = asked_bytes(source, cell), array_read_bytes(cell)
    return max(0.0, 1 - read / asked) if asked and read is not None else None


def blurred_share(cell: Cell) -> float:
    """Of what was read, so much may be missing since nobody looked when the load began or ended: in
    a short cell whose looks are slow, more than a third."""
    seconds = BLURRED_SECONDS if cell.blurred_seconds is None else cell.blurred_seconds
    return seconds / cell.seconds if cell.seconds else 0.0


def answered(source: Source, one: Summary) -> bool:
    """So much of it that its rate is not one of drives."""

    def surely(cell: Cell) -> float | None:
        found = share_of(source, cell)
        return None if found is None else found - blurred_share(cell)

    least = one.spread(lambda each: surely(each.cell))
    return least is not None and least.median > SHARE_MAX


def of_drives_only(cell: Cell) -> bool:
    """Drives were counted, and not what is asked beneath the cache. For a block of 4 KiB a file
    system may read 16: then memory may have answered three of four, and nothing is missing."""
    return cell.array_read_bytes is None and cell.array_drive_read_bytes is not None


def may_have_answered(source: Source, one: Summary) -> bool:
    """It was asked for reads, and nobody counted those that are asked beneath the cache: as of
    btrfs and ZFS, of whose drives only is counted, and nothing at all in older runs."""
    uncounted = share(source, one) is None or any(of_drives_only(each.cell) for each in one.figures)
    return asked_bytes(source, one.cell) > 0 and uncounted


def told(source: Source, one: Summary) -> str:
    """For `answered` ones. Rounded down: a tenth of a percent may still be of drives."""
    return f"{int(share(source, one) * 100)} %"


def warning(source: Source, load: str, summaries: list[Summary]) -> str:
    """Beside the verdict: these rows say nothing of the array."""
    if source.is_fio:
        its = [one for one in summaries if answered(source, one)]
        rows = [f"{one.cell.side}, {one.cell.state} ({told(source, one)})" for one in its]
        if not rows:
            return ""
        return (
            "MEMORY ANSWERED READS, and not the drives. So much of what was read was never asked "
            f"of them, and these rows are not compared with bare drives: {'; '.join(rows)}."
        )
    return of_transactions(source, load, summaries)


def of_transactions(source: Source, load: str, summaries: list[Summary]) -> str:
    if not source.only_reads(load):
        return ""
    unread, uncounted = [], []
    for one in summaries:
        reads = one.spread(lambda each: of_each(array_reads(each.cell), each.cell.operations))
        row = f"{one.cell.side}, {one.cell.state}"
        if reads is None:
            uncounted.append(row)
        elif reads.median < READS_ENOUGH:
            unread.append(row)
    said = []
    if unread:
        said.append(
            "THE ARRAY WAS NOT READ: memory answered, with less than one read of the array for "
            f"{1 / READS_ENOUGH:.0f} operations. These rows say nothing of arrays: "
            f"{'; '.join(unread)}."
        )
    if uncounted:
        said.append(
            "Reads of the array were not counted, and memory may have answered these rows too: "
            f"{'; '.join(uncounted)}."
        )
    return " ".join(said)


def of_each(reads: int | None, operations: int) -> float | None:
    return reads / operations if reads is not None and operations else None

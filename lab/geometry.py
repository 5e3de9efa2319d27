"""What one request costs the drives of an array, counted out place by place. Pure.

An array of n members keeps k data and m parity chunks in a stripe, n = k + m; parity turns from
stripe to stripe, so each case is looked at in n stripes. An operation occupies its drive for
`max(1 / operations a second, bytes / bytes a second)`; one that goes on where the last has ended,
for its bytes alone, unless the drive is a model, which counts each. Allowed are so many requests a
second as keep the busiest drive busy. The same is in
`crates/raid/examples/drive_limited/geometry.rs` for models of drives; this one knows drives that
read and write at unlike speeds, and any members away.

- A random read is one operation; of a block that is away, k others.
- A random write reads what its parity has to be worked out from, in the cheapest way, then writes
  the block and its parity: 2 reads and 2 writes of RAID 5, 3 and 3 of RAID 6.
- Sequential requests are whole stripes: k chunks are read (parity in the place of one that is
  away), or all that are there are written, and nothing is read.
- Of mirrors one copy is read, in turn, and all that are there are written.
- A journal takes each byte before that, in operations between those in place, divided over the
  members as a stripe is; degraded without a share to spare, whole on as many members as may be
  lost, and one more.
- A journal puts writes in place together that meet in it. `pending` is how much of the span that
  is written to waits in it: of a block it stores the newest only, of neighbours one operation.
"""

from dataclasses import dataclass
from itertools import combinations, product

BLOCK_BYTES = 4096
BATCH_BYTES = 256 << 10  # of data, the largest that the journal writes at once


@dataclass(frozen=True)
class Drive:
    """What one drive does, alone and for ever."""

    reads_per_second: float
    writes_per_second: float
    read_bytes_per_second: float
    write_bytes_per_second: float
    is_model: bool = False

    def read_seconds(self, count_bytes: float, goes_on: bool = False) -> float:
        each = self.each_seconds(self.reads_per_second, goes_on)
        return max(each, count_bytes / self.read_bytes_per_second)

    def write_seconds(self, count_bytes: float, goes_on: bool = False) -> float:
        each = self.each_seconds(self.writes_per_second, goes_on)
        return max(each, count_bytes / self.write_bytes_per_second)

    def each_seconds(self, per_second: float, goes_on: bool) -> float:
        return 1 / per_second if self.is_model or not goes_on else 0.0


@dataclass(frozen=True)
class Load:
    """What a request asks of each member on average, seconds of its time, and of all together."""

    seconds: tuple[float, ...]
    reads: float = 0
    writes: float = 0

    @property
    def busiest_seconds(self) -> float:
        return max(self.seconds)

    def times(self, factor: float) -> "Load":
        return Load(
            tuple(one * factor for one in self.seconds), self.reads * factor, self.writes * factor
        )

    def plus(self, other: "Load") -> "Load":
        both = tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True))
        return Load(both, self.reads + other.reads, self.writes + other.writes)


@dataclass(frozen=True)
class Geometry:
    data: int
    parity: int
    chunk_bytes: int
    journal: bool = False
    away: tuple[int, ...] = ()  # members
    copies: int = 1  # of each chunk, on members beside each other

    def __post_init__(self):
        if len(self.away) > self.losses:
            raise ValueError(f"{len(self.away)} drives out, and only {self.losses} may be lost")

    @property
    def losses(self) -> int:
        return self.parity if self.copies == 1 else self.copies - 1

    @property
    def members(self) -> int:
        return (self.data + self.parity) * self.copies

    @property
    def here(self) -> tuple[int, ...]:
        return tuple(each for each in range(self.members) if each not in self.away)

    @property
    def divides_journal(self) -> bool:
        """Batches are divided over the members while there is a share to spare."""
        return self.copies == 1 and len(self.here) > self.data

    @property
    def stripe_bytes(self) -> int:
        return self.data * self.chunk_bytes

    # Requests

    def random_read(self, drive: Drive, block: int = BLOCK_BYTES) -> Load:
        if self.copies > 1:
            seconds, reads = self.of_a_set(drive.read_seconds(block), of_all=False)
            return Load(seconds, reads=reads)
        seconds, reads = [0.0] * self.members, 0.0
        cases = self.members * self.data
        for stripe, position in self.places():
            member = self.member(stripe, position)
            if member not in self.away:
                seconds[member] += drive.read_seconds(block) / cases
                reads += 1 / cases
            else:  # any k of the others; which ones turns with the stripes
                share = self.data / len(self.here)
                for other in self.here:
                    seconds[other] += share * drive.read_seconds(block) / cases
                reads += self.data / cases
        return Load(tuple(seconds), reads=reads)

    def stripe_read(self, drive: Drive) -> Load:
        if self.copies > 1:
            each = drive.read_seconds(self.chunk_bytes, goes_on=True)
            seconds, reads = self.of_a_set(each, of_all=False)
            return Load(seconds, reads=reads).times(self.data)
        share = self.data / len(self.here)
        seconds = share * drive.read_seconds(self.chunk_bytes, goes_on=True)
        return self.of_each_here(seconds, reads=self.data)

    def stripe_write(self, drive: Drive) -> Load:
        seconds = drive.write_seconds(self.chunk_bytes, goes_on=True)
        stored = self.of_each_here(seconds, writes=len(self.here))
        return stored.plus(self.journaled(drive, self.stripe_bytes)) if self.journal else stored

    # Of what they are made

    def of_each_here(self, seconds: float, reads: float = 0, writes: float = 0) -> Load:
        each = tuple(0.0 if at in self.away else seconds for at in range(self.members))
        return Load(each, reads, writes)

    def of_a_set(self, seconds: float, of_all: bool) -> tuple[tuple[float, ...], float]:
        """A chunk of mirrors, whichever: of each copy that is here, or of one of them in turn."""
        each, operations = [0.0] * self.members, 0.0
        for first in range(0, self.members, self.copies):
            here = [at for at in range(first, first + self.copies) if at in self.here]
            done = len(here) if of_all else 1
            for at in here:
                each[at] += seconds * done / len(here) / self.data
            operations += done / self.data
        return tuple(each), operations

    def places(self):
        """Every data block of n stripes."""
        return ((stripe, at) for stripe in range(self.members) for at in range(self.data))

    def member(self, stripe: int, position: int) -> int:
        return (stripe + position) % self.members

    def in_place(self, drive: Drive, block: int, together: int) -> Load:
        """Of one block, of `together` blocks of one row that are stored at once."""
        if self.copies > 1:
            seconds, writes = self.of_a_set(drive.write_seconds(block), of_all=True)
            return Load(seconds, writes=writes)
        seconds, reads, writes = [0.0] * self.members, 0, 0
        cases = 0
        turns = range(max(self.parity, 1))
        for stripe, turn in product(range(self.members), turns):
            for blocks in combinations(range(self.data), together):
                read, written = self.positions(stripe, blocks, turn)
                cases += together
                for position in read:
                    seconds[self.member(stripe, position)] += drive.read_seconds(block)
                for position in written:
                    seconds[self.member(stripe, position)] += drive.write_seconds(block)
                reads, writes = reads + len(read), writes + len(written)
        return Load(tuple(one / cases for one in seconds), reads / cases, writes / cases)

    def positions(self, stripe: int, blocks: tuple[int, ...], turn: int):
        """What is read and what is written, of a stripe's k data positions and m of parity.

        Where all of a row is worked out, parity is read in turn, after what there is of data.
        """
        here = {at for at in range(self.members) if self.member(stripe, at) not in self.away}
        parity = [at for at in range(self.data, self.members) if at in here]
        written = [at for at in (*blocks, *parity) if at in here]
        if not parity:
            return [], written
        ways = []
        others = set(range(self.data)) - set(blocks)
        if others <= here:
            ways.append(others)
        in_turn = [self.data + (turn + at) % self.parity for at in range(self.parity)]
        row = [at for at in (*range(self.data), *in_turn) if at in here]
        ways.append(set(row[: self.data]))
        if set(blocks) <= here:
            ways.append({*blocks, *parity})
        return sorted(min(ways, key=len)), written

    def journaled(self, drive: Drive, count_bytes: int) -> Load:
        batches = count_bytes / BATCH_BYTES
        if self.divides_journal:
            each = drive.write_seconds(BATCH_BYTES / self.data) * batches
            return self.of_each_here(each, writes=len(self.here) * batches)
        copies = self.losses + 1
        each = drive.write_seconds(BATCH_BYTES) * batches * copies / len(self.here)
        return self.of_each_here(each, writes=copies * batches)

    def destaged(self, drive: Drive, block: int, pending: float) -> Load:
        """Blocks that the journal puts in place, when `pending` of all blocks wait in it.

        With the chance that j blocks of a row wait, they cost what j blocks together cost; and an
        operation is one with its neighbour's, where that row waits too.
        """
        if pending <= 0:
            return self.in_place(drive, block, 1)
        total, blocks = None, 0.0
        for together in range(1, self.data + 1):
            chance = binomial(self.data, together, pending)
            load = self.in_place(drive, block, together).times(together * chance)
            total, blocks = (
                (load if total is None else total.plus(load)),
                blocks + together * chance,
            )
        # a run of neighbours is one operation; only its first has none before it
        return total.times((1 - pending) / blocks)


def binomial(count: int, chosen: int, chance: float) -> float:
    ways = 1
    for at in range(chosen):
        ways = ways * (count - at) // (at + 1)
    return ways * chance**chosen * (1 - chance) ** (count - chosen)

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
  members as a stripe is; degraded without a share to spare, or where shares are small (more than
  32 data chunks), whole on as many members as may be lost, and one more. Of more than two parity
  chunks it has all but two in full, once for each row that is not stored as a whole.
- A journal puts writes in place together that meet in it. `pending` is how much of the span that
  is written to waits in it: of a block it stores the newest only, of neighbours one operation.
"""

import math
from dataclasses import dataclass

BLOCK_BYTES = 4096
BATCH_BYTES = 256 << 10  # of data, the largest that the journal writes at once
SHARE_BYTES_MIN = 8 << 10  # of a batch that is divided: a smaller one stands whole
SUMMED_PARITY_MAX = 2  # chunks of parity of which the journal needs sums only
CHANCE_MIN = 1e-12  # below which nothing is added up


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
        """Batches are divided over the members while there is a share to spare, and shares are not
        small."""
        is_much = self.data * SHARE_BYTES_MIN <= BATCH_BYTES
        return self.copies == 1 and len(self.here) > self.data and is_much

    @property
    def parity_in_full(self) -> float:
        """Chunks of parity of which the journal has all bytes, and no sums; on average, as those
        whose member is away are not written."""
        if not self.journal or self.copies > 1:
            return 0.0
        positions = range(self.data + SUMMED_PARITY_MAX, self.members)
        stripes = range(self.members)
        here = sum(self.member(one, at) not in self.away for one in stripes for at in positions)
        return here / self.members

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
        seconds, reads, writes = [0.0] * self.members, 0.0, 0.0
        for stripe in range(self.members):
            row = Row.of(self, stripe)
            for away in row.counts_away(together):
                cases = row.cases(together, away)
                for position, share in row.read(together, away).items():
                    member = self.member(stripe, position)
                    seconds[member] += cases * share * drive.read_seconds(block)
                    reads += cases * share
                for position, share in row.written(together, away).items():
                    member = self.member(stripe, position)
                    seconds[member] += cases * share * drive.write_seconds(block)
                    writes += cases * share
        blocks = self.members * math.comb(self.data, together) * together
        return Load(tuple(one / blocks for one in seconds), reads / blocks, writes / blocks)

    def reads_first(self) -> float:
        """Of small writes in place, the share that waits for a read before it writes: all of them
        with parity, but those whose parity is away, and those of one data chunk, a mirror."""
        if self.copies > 1:
            return 0.0
        cases = 0
        for stripe in range(self.members):
            row = Row.of(self, stripe)
            cases += sum(row.cases(1, away) for away in row.counts_away(1) if row.waits(away))
        return cases / (self.members * self.data)

    def journaled(self, drive: Drive, count_bytes: int) -> Load:
        batches = count_bytes / BATCH_BYTES
        if self.divides_journal:
            each = drive.write_seconds(BATCH_BYTES / self.data) * batches
            return self.of_each_here(each, writes=len(self.here) * batches)
        copies = min(self.losses + 1, len(self.here))  # of two mirrors one is away: one has it all
        each = drive.write_seconds(BATCH_BYTES) * batches * copies / len(self.here)
        return self.of_each_here(each, writes=copies * batches)

    def destaged(self, drive: Drive, block: int, pending: float) -> Load:
        """Blocks that the journal puts in place, when `pending` of all blocks wait in it.

        With the chance that j blocks of a row wait, they cost what j blocks together cost; and an
        operation is one with its neighbour's, where that row waits too.
        """
        counts = range(1, self.data + 1) if pending > 0 else (1,)
        total, blocks, parity_blocks = None, 0.0, 0.0
        for together in counts:
            chance = binomial(self.data, together, pending) if pending > 0 else 1.0
            if chance < CHANCE_MIN:
                continue
            load = self.in_place(drive, block, together).times(together * chance)
            total = load if total is None else total.plus(load)
            blocks += together * chance
            # a row that is stored as a whole needs none of its parity in the journal
            parity_blocks += self.parity_in_full * chance * (together < self.data)
        # a run of neighbours is one operation; only its first has none before it
        stored = total.times((1 - pending) / blocks)
        if not parity_blocks:
            return stored
        return stored.plus(self.journaled(drive, block).times(parity_blocks / blocks))


@dataclass(frozen=True)
class Row:
    """A row of one stripe, some blocks of which are written. Which these are is all the same, but
    for how many of them have their member away: so cases are counted, and not looked at one by one.
    64 members with eight of parity have more of them than anybody can look at."""

    data: int
    away: int  # data positions whose member is
    data_here: tuple[int, ...]
    parity_here: tuple[int, ...]
    parity: int

    @classmethod
    def of(cls, geometry: Geometry, stripe: int) -> "Row":
        at = range(geometry.members)
        here = [one for one in at if geometry.member(stripe, one) not in geometry.away]
        data = tuple(one for one in here if one < geometry.data)
        return cls(
            geometry.data, geometry.data - len(data), data, tuple(here[len(data) :]),
            geometry.parity,
        )  # fmt: skip

    def counts_away(self, together: int) -> range:
        """How many of the blocks may have their member away."""
        return range(max(0, together - len(self.data_here)), min(self.away, together) + 1)

    def cases(self, together: int, away: int) -> int:
        return math.comb(self.away, away) * math.comb(len(self.data_here), together - away)

    def touched(self, together: int, away: int) -> float:
        """Of the cases, in how many a data position that is here is one of the blocks."""
        return (together - away) / len(self.data_here) if self.data_here else 0.0

    def written(self, together: int, away: int) -> dict[int, float]:
        """By position, in what share of the cases."""
        touched = self.touched(together, away)
        return dict.fromkeys(self.data_here, touched) | dict.fromkeys(self.parity_here, 1.0)

    def read(self, together: int, away: int) -> dict[int, float]:
        """The cheapest way to the new parity; of two alike the first."""
        if not self.parity_here:
            return {}
        touched, ways = self.touched(together, away), []
        if away == self.away:  # all others are here
            ways.append((self.data - together, dict.fromkeys(self.data_here, 1 - touched)))
        ways.append((self.data, self.whole()))
        if away == 0:  # the blocks as they were, and their parity
            old = dict.fromkeys(self.data_here, touched) | dict.fromkeys(self.parity_here, 1.0)
            ways.append((together + len(self.parity_here), old))
        return min(ways, key=lambda way: way[0])[1]

    def waits(self, away: int) -> bool:
        """Whether one block has to be worked out from something."""
        return any(self.read(1, away).values())

    def whole(self) -> dict[int, float]:
        """What all of a row is worked out from. Parity is read in turn, after what there is of
        data."""
        found = dict.fromkeys(self.data_here, 1.0)
        for turn in range(self.parity):
            turned = (self.data + (turn + at) % self.parity for at in range(self.parity))
            for position in [one for one in turned if one in self.parity_here][: self.away]:
                found[position] = found.get(position, 0.0) + 1 / self.parity
        return found


def binomial(count: int, chosen: int, chance: float) -> float:
    return math.comb(count, chosen) * chance**chosen * (1 - chance) ** (count - chosen)

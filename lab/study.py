"""What a study is: a TOML file, read into these classes, and nothing that they do not know.

    study = study.load(Path("lab/studies/postgres-vm.toml"))

A word that no class here has is a mistake of the writer: it is refused with its place and the word
that it resembles, before anything is started. Sizes are `64K`, `4G`, powers of 1024.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
QUICK = "quick"
CHUNK_BYTES_MIN = 4096
PARITY_MAX = 8  # of levels N+M (crates/control/src/level.rs)
FIO_BYTES_MIN = 10 << 20  # a tenth is what is checked; in whole MiB
FIO_DEPTH_MAX = 32768  # that io_uring has (IORING_MAX_ENTRIES); with more, fio does not begin
FIO_JOBS_MAX = 4088  # of one fio: 4096, of which it keeps a few for itself
SECTOR_BYTES = 512  # direct I/O is of whole ones
FIO_BLOCK_MAX = 0x7FFFF000  # that Linux takes as one request (MAX_RW_COUNT)


class StudyError(Exception):
    """The study cannot be run as it is written; the message names the place and the fix."""


def size_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+)([KMGT]?)(i?B)?", value.strip(), re.IGNORECASE)
    if not match:
        raise ValueError("is not a size: write it like 512M or 4G")
    return int(match[1]) * UNITS[match[2].upper()]


Bytes = Annotated[int, BeforeValidator(size_bytes), Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]  # becomes part of names of files


def one_cpu(value: object) -> object:
    """TOML takes `cores=7` for a number."""
    return str(value) if type(value) is int else value


def cpus(text: str) -> str:
    for first, last in re.findall(r"(\d+)-(\d+)", text):
        if int(first) > int(last):
            raise ValueError(f"goes backwards: write {last}-{first}")
    return text


Cpus = Annotated[
    str,
    BeforeValidator(one_cpu),
    Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$"),
    AfterValidator(cpus),
]


def chunk_bytes(value: int) -> int:
    if value < CHUNK_BYTES_MIN or value & (value - 1):
        raise ValueError("is no power of two from 4K on")
    return value


def fio_bytes(value: int) -> int:
    if value < FIO_BYTES_MIN:
        raise ValueError(f"is less than {FIO_BYTES_MIN >> 20}M, of which a part is checked")
    return value


def once_each(values: tuple) -> tuple:
    if twice := [str(value) for value in dict.fromkeys(values) if values.count(value) > 1]:
        raise ValueError(f"names {', '.join(twice)} more than once")
    return values


Some = (Field(min_length=1), AfterValidator(once_each))


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Where(StrEnum):
    """Whence the load sees the array."""

    VM = "vm"  # the array is on the host, the load in virtual machines on it
    HOST = "host"  # array and load on the host itself
    GUEST = "guest"  # array and load both in one guest, on drives that QEMU emulates


class State(StrEnum):
    """What each array is put into before a load is measured on it."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # one drive out
    DEGRADED_TWICE = "degraded-twice"  # two out, of arrays that may lose two
    REBUILDING = "rebuilding"  # the spare has just taken its place

    @property
    def drives_out(self) -> int:
        """Of every array, when it begins."""
        return {State.HEALTHY: 0, State.DEGRADED_TWICE: 2}.get(self, 1)


class Drives(Table):
    """What the arrays of each side are made of; each side gets the same, one after the other."""

    kind: Literal["file", "block", "model", "nvme"] = "file"
    size: Bytes = 4 << 30  # of a file, a model, or an emulated NVMe drive
    paths: tuple[str, ...] = ()  # block: the drives, all of which will be overwritten
    identities: tuple[str, ...] = ()  # of these; a run writes them down, and goes on with no others
    directory: str | None = None  # file, nvme: a new one for them is made in it; the cache if none
    iops: Count | None = None  # model: of each drive
    mbps: Count | None = None  # model: of each drive, 1,000,000 bytes a second


class Array(Table):
    """Geometry that all sides share: equal protection is what makes them comparable."""

    count: Count = 1
    data: Count = 4
    # of Ashlar; each side refuses what it has not (md and btrfs more than 2, ZFS more than 3)
    parity: Annotated[int, Field(ge=0, le=PARITY_MAX)] = 1
    copies: Annotated[int, Field(ge=1, le=4)] = 1  # of each chunk; more are in the place of parity
    chunk: Annotated[Bytes, AfterValidator(chunk_bytes)] = 64 << 10

    @model_validator(mode="before")
    @classmethod
    def mirrored(cls, values):
        """Who asks for copies need not say that there is no parity."""
        if isinstance(values, dict) and values.get("copies", 1) != 1:
            return {"parity": 0} | values
        return values

    @model_validator(mode="after")
    def has_one_kind(self):
        if self.copies > 1 and self.parity:
            raise ValueError("has copies and parity: say `parity = 0`, or no `copies`")
        return self

    @property
    def members(self) -> int:
        return (self.data + self.parity) * self.copies

    @property
    def losses(self) -> int:
        """Drives that may go, whichever they are."""
        return self.parity if self.copies == 1 else self.copies - 1

    @property
    def shape(self) -> str:
        """As people write it: 4+1 drives, or 4x2 of mirrors."""
        return f"{self.data}+{self.parity}" if self.copies == 1 else f"{self.data}x{self.copies}"


SIDES = ("ashlar", "mdraid", "raw", "btrfs", "zfs", "qemu-storage-daemon", "spdk")


# Words of a side besides `kind` and `name`: a word that does nothing would be taken for measured.
WORDS = {
    "ashlar": ("policy", "integrity", "cores", "export"),
    "mdraid": ("policy", "bitmap", "group_thread_cnt", "stripe_cache_size"),
    "raw": ("raid0",),
    "qemu-storage-daemon": ("cores",),
    "spdk": ("cores",),
}
POLICIES = {"ashlar": ("journal", "bitmap", "none"), "mdraid": ("ppl",)}
KIND_OF = {"paths": "block", "iops": "model", "mbps": "model"}  # of drives that have this word
# There is no redundancy, and one state only. Each load has a drive of its own, but with `raid0`.
ALONE = ("raw", "qemu-storage-daemon", "spdk")


class Side(Table):
    """One contender. What is not said is as the contender's own documentation advises."""

    kind: Literal[SIDES]
    name: Name = ""  # in tables; the kind, if not said
    # ashlar: journal, bitmap, none; mdraid: ppl, a log of parity that closes RAID 5's write hole
    policy: Literal["journal", "bitmap", "none", "ppl"] | None = None
    integrity: bool = False  # ashlar
    cores: Cpus | None = None  # ashlar, spdk, qemu-storage-daemon: the CPUs it may use
    export: Literal["vhost-user-blk", "fuse", "ublk", "nbd"] | None = None  # ashlar
    bitmap: bool = True  # mdraid: the write-intent bitmap, without which a crash is a full resync
    group_thread_cnt: Annotated[int, Field(ge=0)] | None = None  # mdraid
    stripe_cache_size: Count | None = None  # mdraid
    raid0: bool = False  # raw: all drives of an array as one, and not a drive for each load

    @model_validator(mode="before")
    @classmethod
    def named(cls, values):
        if isinstance(values, dict) and "kind" in values:
            return {"name": values["kind"]} | values
        return values


class Vm(Table):
    """The virtual machines; also the one guest of `where = "guest"`."""

    count: Count = 1
    cpus: Count = 2
    memory: Bytes = 1 << 30
    pin: bool = False  # each virtual CPU to a CPU of its own, beside those of the storage
    huge_pages: bool = False


class Pgbench(Table):
    scale: Count = 50  # 15 MB each
    scripts: Annotated[
        tuple[Literal["select-only", "simple-update", "tpcb-like"], ...], *Some
    ] = ("select-only", "simple-update", "tpcb-like")  # fmt: skip
    clients: Annotated[tuple[Count, ...], *Some] = (10,)
    threads: Count = 2
    seconds: Seconds = 60
    warm_seconds: Annotated[int, Field(ge=0)] = 5  # before what is measured
    log_share: Annotated[float, Field(gt=0, le=1)] = 1  # of select-only; all others are whole
    settings: dict[str, bool | int | str] = {}  # of postgresql.conf; shown in the report


class Pattern(Table):
    """One fio job."""

    name: Name
    rw: Literal["randread", "randwrite", "randrw", "read", "write"]
    block: Bytes = 4096
    read_percent: Annotated[int, Field(ge=0, le=100)] | None = None  # of randrw
    depth: Count = 32
    jobs: Count = 1

    @property
    def read_share(self) -> float:
        """Of its requests, as fio has it: half of a mix that says nothing."""
        said = 50 if self.read_percent is None else self.read_percent
        return {"randrw": said / 100, "randwrite": 0.0, "write": 0.0}.get(self.rw, 1.0)


class Fio(Table):
    patterns: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    # How much of each disk is used; all of it, if not said.
    size: Annotated[Bytes, AfterValidator(fio_bytes)] | None = None
    vms: Annotated[tuple[Count, ...], *Some] = (1,)  # how many load at once; where = "vm" only
    seconds: Seconds = 30
    warm_seconds: Annotated[int, Field(ge=0)] = 5


class Study(Table):
    title: str
    about: str = ""
    where: Where
    drives: Drives = Drives()
    array: Array = Array()
    side: Annotated[tuple[Side, ...], Field(min_length=1)]
    vm: Vm = Vm()
    pgbench: Pgbench | None = None
    fio: Fio | None = None
    states: Annotated[tuple[State, ...], *Some] = (State.HEALTHY,)
    repeats: Count = 3  # of the whole round of sides, one after the other: A B A B
    raw: bool = False  # measure the drives themselves first, for efficiency
    unequal: bool = False  # sides of unlike protection are compared; the report says so on top

    @property
    def disks(self) -> int:
        """How many are given to loads, which is how many loads there are."""
        return self.vm.count if self.where == Where.VM else self.array.count

    def drives_behind(self, loads: int, kind: str, raid0: bool = False) -> int:
        """On which so many loads have their disks: members of arrays, or a drive for each."""
        if kind in ALONE and not raid0:
            return loads
        return min(self.array.count, loads) * self.array.members

    @model_validator(mode="after")
    def fits_together(self):
        if (self.pgbench is None) == (self.fio is None):
            raise ValueError("has either a table [pgbench] or a table [fio]")
        names = [side.name for side in self.side]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f'has two sides named "{twice}": give one another `name`')
        if State.DEGRADED_TWICE in self.states and self.array.losses < 2:
            raise ValueError(
                'has the state "degraded-twice": that needs `parity` 2 or `copies` 3, or more'
            )
        if self.array.losses == 0 and set(self.states) != {State.HEALTHY}:
            raise ValueError(
                "has neither parity nor copies: without a drive there is nothing left to measure"
            )
        if self.drives.kind == "nvme" and self.where != Where.GUEST:
            raise ValueError('has drives of kind "nvme": those are emulated, `where = "guest"`')
        patterns = [pattern.name for pattern in self.fio.patterns] if self.fio else []
        if len(set(patterns)) < len(patterns):
            raise ValueError("has two patterns of one `name`")
        if self.fio and self.where == Where.VM and max(self.fio.vms) > self.vm.count:
            raise ValueError(f"loads {max(self.fio.vms)} `fio.vms` of {self.vm.count} `vm.count`")
        if self.drives.kind == "model" and not (self.drives.iops and self.drives.mbps):
            raise ValueError('has drives of kind "model": say their `iops` and `mbps`')
        return self


def load(
    path: Path, quick: bool = False, changes: Sequence[str] = (), where: Where | None = None
) -> Study:
    """Reads a study; with `quick`, its table [quick] replaces what stands there too.

    `changes` are `key=value`, such as `drives.size=8G` or `side.ashlar.policy=bitmap`; they win.
    With `where`, it is run there, without the words that it has for other places.
    """
    try:
        words = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise StudyError(f"{path} is not there: `ashlar-lab list` shows the studies") from None
    except OSError as error:
        raise StudyError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: {error}") from None
    shorter = words.pop(QUICK, {})
    if not isinstance(shorter, dict):
        raise StudyError(f"{path}: `{QUICK}` is no table: write [{QUICK}]")
    try:
        written = Study.model_validate(words)
        short = Study.model_validate(shortened := merged(words, shorter))
        # also those of [quick], whether it is asked for or not
        refuse_useless(path, written, short, place=where is None)
        chosen = moved(shortened if quick else words, where)
        for change in changes:
            chosen = changed(chosen, change)
        made = Study.model_validate(chosen)
    except ValidationError as error:
        raise StudyError("\n".join(f"{path}: {one}" for one in mistakes(error))) from None
    refuse_useless(path, made)
    return made


def moved(words: dict, where: Where | None) -> dict:
    """The same study, whence `where` says: what does nothing there is dropped, and drives are of
    the kind that is there."""
    if where is None:
        return words
    dropped = {"vm": [], "fio": [], "drives": [], "array": []}
    if where != Where.VM:
        dropped |= {"vm": ["count"], "fio": ["vms"]}
    if where == Where.GUEST:
        dropped |= {"drives": ["kind", *KIND_OF, "identities"], "array": ["count"]}
    elif words.get("drives", {}).get("kind") == "nvme":
        dropped |= {"drives": ["kind"]}
    made = words | {"where": str(where)}
    for table, its in dropped.items():
        if table in words:
            made[table] = without(words[table], its)
    if where == Where.GUEST:
        made["drives"] = made.get("drives", {}) | {"kind": "nvme"}
    if where == Where.HOST:
        made.pop("vm", None)
    if where != Where.VM:  # which alone takes such an export
        made["side"] = [
            without(side, ["export"] if side.get("export") == "vhost-user-blk" else [])
            for side in words["side"]
        ]
    return made


def without(table: dict, words: Sequence[str]) -> dict:
    return {word: value for word, value in table.items() if word not in words}


def refuse_useless(path: Path, *several: Study, place: bool = True) -> None:
    """Words that do nothing, those of another place only with `place`; and what no fio does."""
    found = []
    for study in several:
        found += [*useless_of_sides(study), *useless_of_drives(study.drives)]
        found += [*(useless_of_vms(study) if place else ()), *useless_of_patterns(study)]
        found += impossible_of_patterns(study)
    if found:
        raise StudyError("\n".join(f"{path}: {one}" for one in dict.fromkeys(found)))


def useless_of_sides(study: Study) -> Iterator[str]:
    """Words that a side's kind does not have. Not in the model: results of before are still read,
    and a study.json has all words."""
    for side in study.side:
        its, policies = WORDS.get(side.kind, ()), POLICIES.get(side.kind, ())
        for word in sorted(side.model_fields_set - {"kind", "name", *its}):
            allowed = ", ".join(f"`{each}`" for each in its) or "nothing but a `name`"
            yield f"`side.{side.name}.{word}`: a side of kind {side.kind} takes {allowed}"
        if "policy" in its and side.policy not in (None, *policies):
            allowed = ", ".join(f'"{each}"' for each in policies)
            yield (
                f'`side.{side.name}.policy`: "{side.policy}" is no policy of kind {side.kind}, '
                f"which takes {allowed}, or none of it said"
            )
        if side.policy == "ppl" and "bitmap" in side.model_fields_set:
            yield f"`side.{side.name}.bitmap`: the policy ppl has none, say one of the two"


def useless_of_drives(drives: Drives) -> Iterator[str]:
    for word, kind in KIND_OF.items():
        if word in drives.model_fields_set and drives.kind != kind:
            yield f'`drives.{word}`: drives of kind "{drives.kind}" have none, say kind = "{kind}"'


def useless_of_vms(study: Study) -> Iterator[str]:
    """The host has no guests, and one guest is not several."""
    said = study.vm.model_fields_set
    for word in sorted(said & ({"count"} if study.where == Where.GUEST else said)):
        if study.where != Where.VM:
            yield f'`vm.{word}`: does nothing with where = "{study.where}", take it out'
    if study.fio and study.where != Where.VM and "vms" in study.fio.model_fields_set:
        yield f'`fio.vms`: does nothing with where = "{study.where}", take it out'


def useless_of_patterns(study: Study) -> Iterator[str]:
    for pattern in study.fio.patterns if study.fio else ():
        if pattern.read_percent is not None and pattern.rw != "randrw":
            yield (
                f"`read_percent` of the pattern {pattern.name}: does nothing with rw = "
                f'"{pattern.rw}", say rw = "randrw" or take it out'
            )


def impossible_of_patterns(study: Study) -> Iterator[str]:
    """Not in the model, either: older results may have asked for it, and are still told of."""
    for at, pattern in enumerate(study.fio.patterns if study.fio else ()):
        name = f"`fio.patterns.{at}"
        if pattern.block % SECTOR_BYTES:
            yield (
                f"{name}.block`: is {pattern.block}, and direct I/O is of whole sectors: say a "
                f"multiple of {SECTOR_BYTES}, such as 4K"
            )
        if pattern.block > FIO_BLOCK_MAX:
            yield (
                f"{name}.block`: is {pattern.block}, and Linux takes {FIO_BLOCK_MAX} as one "
                "request at most: say a smaller one, such as 1M"
            )
        if pattern.depth > FIO_DEPTH_MAX:
            yield (
                f"{name}.depth`: is {pattern.depth}, and io_uring has {FIO_DEPTH_MAX} requests "
                "under way at most: say fewer, and more `jobs`"
            )
        if pattern.jobs > FIO_JOBS_MAX:
            yield (
                f"{name}.jobs`: is {pattern.jobs}, and one fio has {FIO_JOBS_MAX} jobs at most: "
                "say fewer, and a larger `depth`"
            )


def as_run(path: Path) -> Study:
    """The study.json of a run."""
    try:
        return Study.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise StudyError(
            f"{path} is not there: is {path.parent} a directory of results?"
        ) from None
    except ValidationError as error:
        raise StudyError("\n".join(f"{path}: {one}" for one in mistakes(error))) from None


def merged(words: dict, shorter: dict) -> dict:
    """Tables are merged key by key, everything else is replaced."""
    result = dict(words)
    for key, value in shorter.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def changed(words: dict, change: str) -> dict:
    """A value is what TOML makes of it, or else the word itself. A side is named by its name."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise StudyError(f"--set {change}: write KEY=VALUE, such as drives.size=8G")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    return with_value(words, key.strip().split("."), value, change)


def with_value(words: dict | list, keys: list[str], value: object, change: str):
    first, *others = keys
    is_sides = isinstance(words, list) and all(isinstance(each, dict) for each in words)
    if not isinstance(words, dict) and not (is_sides and others):
        raise StudyError(f"--set {change}: `{first}` is no place for a value")
    if is_sides:
        names = [str(each.get("name", each.get("kind"))) for each in words]
        if first not in names:
            raise StudyError(f"--set {change}: there is no side {first}: {', '.join(names)}")
        return [
            with_value(each, others, value, change) if name == first else each
            for name, each in zip(names, words, strict=True)
        ]
    if not others:
        return words | {first: value}
    return words | {first: with_value(words.get(first, {}), others, value, change)}


def only(study: Study, names: list[str]) -> Study:
    """The study with these sides, in this order."""
    known = {side.name: side for side in study.side}
    if unknown := [name for name in names if name not in known]:
        raise StudyError(f"there is no side {', '.join(unknown)}: the study has {', '.join(known)}")
    if len(set(names)) < len(names):
        raise StudyError(f"the sides {', '.join(names)} are not one each")
    return study.model_copy(update={"side": tuple(known[name] for name in names)})


def mistakes(error: ValidationError) -> Iterator[str]:
    """Of a list whose only entry is wrong, pydantic says also that it is too short."""
    places = [one["loc"] for one in error.errors()]
    for one in error.errors():
        at = one["loc"]
        within = any(len(each) > len(at) and each[: len(at)] == at for each in places)
        if one["type"] != "too_short" or not within:
            yield told(one)


def told(error: dict) -> str:
    """One mistake, in the words of the file."""
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        like = difflib.get_close_matches(str(error["loc"][-1]), known_words(), 1)
        meant = f"; did you mean `{like[0]}`?" if like else ""
        return f"`{place}` is nothing that a study has{meant}"
    said = out_of_bounds(error) or error["msg"].removeprefix("Value error, ")
    return f"`{place}`: {said}" if place else f"the study {said}"


# Of pydantic: type of a mistake → where the bound is in it, and how a person says it.
BOUNDS = {
    "greater_than": ("gt", "more than {}"),
    "greater_than_equal": ("ge", "{} or more"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "{} or less"),
}


def out_of_bounds(error: dict) -> str:
    """With what was said, and what may be: also of times, of which none is negative."""
    if error["type"] not in BOUNDS:
        return ""
    key, words = BOUNDS[error["type"]]
    return f"is {error['input']}: say {words.format(error['ctx'][key])}"


def known_words() -> list[str]:
    tables = (Study, Drives, Array, Side, Vm, Pgbench, Pattern, Fio)
    return [QUICK, *{word for table in tables for word in table.model_fields}]

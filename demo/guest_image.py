"""The guest: Debian 12 with PostgreSQL 15 and fio, and the stock kernel, made once from packages.

    guest = guest_image.build(cache)     # at once, if it is there
    guest = guest_image.build(cache, recipe=guest_image.NEW_KERNEL)

No image is downloaded and no maintainer script runs: mmdebstrap extracts the packages, this file
adds the few files that scripts would have written, and mke2fs makes a file system of the directory.
So it needs no root, no chroot and no mount, and leaves nothing behind when it is stopped half-way.

Three files come out. `vmlinux` is the stock kernel unpacked: a stock `vmlinuz` unpacks itself
inside the guest, which costs three seconds of each boot under emulation. `initrd` holds the modules
that the root disk needs. `root.img` is the file system, read-only, shared by all guests at once.
"""

import fcntl
import hashlib
import lzma
import os
import re
import shlex
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from demo import child

PACKAGES = [
    # extracted alone, nothing is there: also what Debian calls essential must be named
    "bash", "coreutils", "dash", "findutils", "grep", "gzip", "hostname", "libc-bin", "mawk",
    "mount", "procps", "sed", "tar", "util-linux", "util-linux-extra",
    "busybox-static", "e2fsprogs", "fio", "kmod", "xfsprogs",
]  # fmt: skip
BACKPORTS = "bookworm-backports"
# Nothing in the guest uses these, and they are two thirds of the bytes. LLVM is PostgreSQL's
# just-in-time compiler, which switches itself off when it is not there.
UNUSED = [
    "boot", "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/i18n",
    "usr/share/perl", "usr/share/info", "usr/lib/python3.11", "usr/lib/x86_64-linux-gnu/perl*",
    "usr/lib/x86_64-linux-gnu/libLLVM*", "usr/lib/postgresql/15/lib/llvmjit*",
    "usr/lib/postgresql/15/lib/bitcode", "var/lib/apt", "var/cache/apt",
    "lib/modules/*/kernel/sound",
]  # fmt: skip
DRIVERS_KEPT = {"block", "char", "iommu", "md", "net", "nvme", "scsi", "vfio", "vhost", "virtio"}
NETWORK_DRIVERS_KEPT = {"net_failover", "virtio_net"}
MODULES_AT_BOOT = ["virtio_pci", "virtio_blk", "virtio_console", "crc32c_generic", "ext4"]

ZSTD_MAGIC = bytes.fromhex("28b52ffd")  # RFC 8878, 3.1.1
BUILD_SECONDS_MAX = 900
BUILD_BYTES = 3 << 30  # what the build needs at its widest moment
HERE = Path(__file__).parent / "guest"
DEBIAN_MIRROR = "http://deb.debian.org/debian"
DEBIAN_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class BuildError(Exception):
    """The guest could not be built; the message names the fix."""


@dataclass(frozen=True)
class Recipe:
    """What a guest is made of, besides what each has."""

    name: str  # where it is in the cache
    packages: tuple[str, ...]
    suites: tuple[str, ...] = ()  # of Debian's archive, besides those of Debian 12


USUAL = Recipe("guest", ("linux-image-amd64", "mdadm", "nvme-cli", "postgresql-15"))
# For what the stock kernel does not have, ublk and authentication of NVMe hosts, and for storage of
# several kinds in one guest beside what loads it.
NEW_KERNEL = Recipe(
    "guest-new-kernel",
    (f"linux-image-amd64/{BACKPORTS}", "btrfs-progs", "mdadm", "nvme-cli", "postgresql-15"),
    (BACKPORTS,),
)


@dataclass(frozen=True)
class GuestImage:
    """Files of one built guest, and the key that changes when its recipe does."""

    kernel: Path
    initrd: Path
    root: Path
    key: str


def build(cache: Path, say=lambda text: None, recipe: Recipe = USUAL) -> GuestImage:
    """Gives the guest, building it first if it is not in the cache (a minute or two)."""
    key = recipe_key(recipe)
    home = cache / recipe.name / key
    image = GuestImage(home / "vmlinux", home / "initrd", home / "root.img", key)
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(cache / "guest.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second builder waits here and then finds it made
        if home.exists():
            return image
        for stale in home.parent.iterdir():
            shutil.rmtree(stale)
        if shutil.disk_usage(cache).free < BUILD_BYTES:
            raise BuildError(f"building the guest needs {BUILD_BYTES >> 30} GiB free in {cache}")
        work = home.with_suffix(".work")
        try:
            build_in(work, recipe, Tools(work, cache / "guest-build.log"), say)
            shutil.rmtree(work / "files")
            work.rename(home)  # only a whole guest gets the final name
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return image


def recipe_key(recipe: Recipe) -> str:
    """Changes with anything that decides what the guest contains."""
    key = hashlib.sha256(Path(__file__).read_bytes() + repr(recipe).encode())
    for script in sorted(HERE.iterdir()):
        key.update(script.read_bytes())
    return key.hexdigest()[:12]


def build_in(work: Path, recipe: Recipe, tools: "Tools", say) -> None:
    files = work / "files"
    files.mkdir(parents=True)
    say("fetching packages")
    extract_packages(files, recipe, tools)
    kernel = next((files / "boot").glob("vmlinuz-*"))
    (work / "vmlinux").write_bytes(unpack_kernel(kernel.read_bytes(), tools))
    release = kernel.name.removeprefix("vmlinuz-")
    say("making the file system")
    prune(files)
    tools.run("depmod", "--basedir", str(files), release)
    (work / "initrd").write_bytes(initramfs(files, release))
    add_own_files(files)
    make_file_system(files, work / "root.img", tools)


# Packages


def extract_packages(files: Path, recipe: Recipe, tools: "Tools") -> None:
    """Takes the host's own mirrors if they carry Debian 12, else, or if they fail, Debian's."""
    packages = ",".join([*PACKAGES, *recipe.packages])
    command = [
        "mmdebstrap", "--quiet", "--variant=extract", "--mode=chrootless", "--format=directory",
        "--architectures=amd64", f"--include={packages}", *apt_proxy_options(),
        *[
            f"--setup-hook=echo 'deb [signed-by={DEBIAN_KEYRING}] {DEBIAN_MIRROR} {suite} main' "
            f'>>"$1"/etc/apt/sources.list.d/{suite}.list'
            for suite in recipe.suites
        ],
        "bookworm", str(files),
    ]  # fmt: skip
    sources = host_sources(Path("/etc/apt"))
    if sources:
        try:
            tools.run(*command, "-", text="\n".join(sources) + "\n")
            return
        except BuildError:
            shutil.rmtree(files)
    tools.run(*command)


def apt_proxy_options() -> list[str]:
    """mmdebstrap does not read the host's apt settings; the way to the mirror matters, though."""
    options = []
    for scheme in ("http", "https"):
        name = f"Acquire::{scheme}::Proxy"
        shown = subprocess.run(
            ["apt-config", "shell", "value", name], capture_output=True, text=True
        )
        value = shlex.split(shown.stdout.partition("=")[2])
        options += [f'--aptopt={name} "{value[0]}"'] if value and value[0] else []
    return options


def host_sources(apt: Path) -> list[str]:
    """One-line entries of the host's Debian 12 mirrors, from both styles of source file."""
    found = []
    for file in [apt / "sources.list", *sorted(apt.glob("sources.list.d/*.list"))]:
        for line in file.read_text().splitlines() if file.exists() else []:
            match = re.match(r"deb\s+(?:\[(.*?)\]\s+)?(\S+)\s+(\S+)\s+(.+)", line)
            if match:
                signed = re.search(r"signed-by=(\S+)", match[1] or "", re.IGNORECASE)
                found += debian_entry(match[2], match[3], match[4].split(), signed and signed[1])
    for file in sorted(apt.glob("sources.list.d/*.sources")):
        for stanza in re.split(r"\n\s*\n", file.read_text()):
            stanza = re.sub(r"^#.*\n?", "", stanza, flags=re.MULTILINE)
            field = {
                name.lower(): value.split()
                for name, value in re.findall(
                    r"^(\S+):((?:.*\n?)(?:^\s.*\n?)*)", stanza, re.MULTILINE
                )
            }
            if "deb" not in field.get("types", []) or field.get("enabled") == ["no"]:
                continue
            for uri in field.get("uris", []):
                for suite in field.get("suites", []):
                    signed = field.get("signed-by", [None])[0]
                    found += debian_entry(uri, suite, field.get("components", []), signed)
    return found if any(" bookworm " in entry for entry in found) else []


def debian_entry(uri: str, suite: str, components: list[str], keyring: str | None) -> list[str]:
    """Suite and component tell Debian's own archive from others made for Debian 12."""
    ours = suite in ("bookworm", "bookworm-updates", "bookworm-security") and "main" in components
    if not ours or uri.startswith("cdrom:"):
        return []
    if not keyring or not keyring.startswith("/"):
        keyring = DEBIAN_KEYRING
    return [f"deb [signed-by={keyring}] {uri} {suite} main"]


def prune(files: Path) -> None:
    for pattern in UNUSED:
        for path in files.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for driver in files.glob("lib/modules/*/kernel/drivers/*"):
        if driver.name not in DRIVERS_KEPT:
            shutil.rmtree(driver)
    for driver in files.glob("lib/modules/*/kernel/drivers/net/*"):
        if driver.is_dir():
            shutil.rmtree(driver)
        elif module_name(driver) not in NETWORK_DRIVERS_KEPT:
            driver.unlink()


# Kernel and initramfs


def unpack_kernel(bzimage: bytes, tools: "Tools") -> bytes:
    """The ELF kernel inside a bzImage, which QEMU enters directly (PVH).

    Offsets by the x86 boot protocol: 0x1f1 sectors of set-up code, 0x248 and 0x24c place and length
    of the payload after them. The payload's last four bytes are its length unpacked.
    """
    setup_sectors = bzimage[0x1F1]
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = bzimage[start : start + length - 4]
    kernel = tools.unzstd(payload) if payload.startswith(ZSTD_MAGIC) else lzma.decompress(payload)
    if not kernel.startswith(b"\x7fELF"):
        raise BuildError("the kernel package holds no ELF kernel: has its format changed?")
    return kernel


def initramfs(files: Path, release: str) -> bytes:
    """busybox, the modules in load order, and the script that loads them."""
    archive = Cpio()
    for name in ("dev", "sys", "root", "modules", "bin"):
        archive.add_directory(name)
    archive.add_file("bin/busybox", (files / "bin/busybox").read_bytes(), 0o755)
    archive.add_file("init", (HERE / "initramfs.sh").read_bytes(), 0o755)
    base = files / "lib/modules" / release
    for number, module in enumerate(in_load_order(base, MODULES_AT_BOOT)):
        name = f"modules/{number:02}-{module_name(base / module)}.ko"
        content = (base / module).read_bytes()
        is_packed = module.endswith(".xz")
        archive.add_file(name, lzma.decompress(content) if is_packed else content, 0o644)
    return archive.finish()


def module_name(file: Path) -> str:
    """Newer kernels have their modules packed: `ext4.ko.xz`."""
    return file.name.partition(".ko")[0]


def in_load_order(base: Path, names: list[str]) -> list[str]:
    """The modules named, each after those it depends on; what is built in is left out."""
    depends = {}
    for line in (base / "modules.dep").read_text().splitlines():
        module, _, needs = line.partition(":")
        depends[module] = needs.split()
    by_name = {module_name(Path(module)).replace("-", "_"): module for module in depends}
    order: list[str] = []
    for name in names:
        module = by_name.get(name)
        # depmod lists a module's needs from the nearest to the farthest
        for path in [*reversed(depends[module]), module] if module else []:
            if path not in order:
                order.append(path)
    return order


class Cpio:
    """Writes the "newc" archive that Linux unpacks as its first root."""

    def __init__(self):
        self.bytes = bytearray()
        self.inode = 0

    def add_directory(self, name: str) -> None:
        self.add(name, 0o040755, b"")

    def add_file(self, name: str, content: bytes, mode: int) -> None:
        self.add(name, 0o100000 | mode, content)

    def add(self, name: str, mode: int, content: bytes) -> None:
        self.inode += 1
        name_bytes = name.encode() + b"\0"
        # magic, inode, mode, uid, gid, links, time, size, 4 device numbers, name length, checksum
        fields = [self.inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name_bytes), 0]
        self.bytes += b"070701" + b"".join(b"%08x" % field for field in fields) + name_bytes
        self.pad()
        self.bytes += content
        self.pad()

    def pad(self) -> None:
        self.bytes += bytes(-len(self.bytes) % 4)

    def finish(self) -> bytes:
        self.add("TRAILER!!!", 0, b"")
        return bytes(self.bytes)


# File system


def add_own_files(files: Path) -> None:
    """What the packages' scripts would have written, as far as anything in the guest reads it."""
    own = ("ashlar", "data", "mnt", "proc", "sys", "dev", "run", "tmp", "root", "usr/local/bin")
    for directory in own:
        (files / directory).mkdir(parents=True, exist_ok=True)
    for name in ("init", "agent"):
        target = files / "ashlar" / name
        target.write_bytes((HERE / f"{name}.sh").read_bytes())
        target.chmod(0o755)
    etc = files / "etc"
    (etc / "passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\npostgres:x:100:100::/data:/bin/sh\n"
        "nobody:x:65534:65534::/nonexistent:/bin/false\n"
    )
    (etc / "group").write_text("root:x:0:\ndisk:x:6:\npostgres:x:100:\nnogroup:x:65534:\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    (etc / "hosts").write_text("127.0.0.1 localhost guest\n")
    (etc / "localtime").unlink(missing_ok=True)
    for link, target in (("var/run", "/run"), ("var/tmp", "/tmp"), ("etc/mtab", "/proc/mounts")):
        shutil.rmtree(files / link, ignore_errors=True)
        (files / link).unlink(missing_ok=True)
        (files / link).symlink_to(target)


def make_file_system(files: Path, image: Path, tools: "Tools") -> None:
    """No journal and no checksums: it is only ever mounted read-only."""
    size = sum(path.lstat().st_size + 4096 for path in files.rglob("*"))
    with open(image, "wb") as file:
        file.truncate(size * 5 // 4 // 4096 * 4096)  # a quarter more for the file system's own
    tools.run(
        "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal,^metadata_csum,^64bit", "-m", "0",
        "-E", "root_owner=0:0", "-L", "ashlar-guest", "-d", str(files), str(image),
    )  # fmt: skip


class Tools:
    """Runs the builder's tools; what they say goes to the log, and its end to the error."""

    def __init__(self, work: Path, log: Path):
        self.log = log
        # mke2fs and depmod live in /sbin, which is not on every user's path
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        self.work = work
        self.environment = os.environ | {"PATH": path, "LC_ALL": "C.UTF-8", "TMPDIR": str(work)}

    def run(self, *command: str, text: str = "") -> None:
        try:
            tool = child.run(
                command, BUILD_SECONDS_MAX, text, env=self.environment, stderr=subprocess.STDOUT
            )
        except FileNotFoundError:
            raise BuildError(f"{command[0]} is missing: run scripts/install.sh demo") from None
        except subprocess.TimeoutExpired:
            raise BuildError(
                f"{command[0]} took over {BUILD_SECONDS_MAX} s: is the mirror slow?"
            ) from None
        with open(self.log, "a") as file:
            file.write(f"$ {shlex.join(command)}\n{tool.stdout}\n")
        if tool.returncode != 0:
            last = "\n".join(tool.stdout.strip().splitlines()[-5:])
            raise BuildError(
                f"{command[0]} failed while building the guest (log: {self.log}):\n{last}"
            )

    def unzstd(self, packed: bytes) -> bytes:
        source, target = self.work / "packed.zst", self.work / "packed"
        source.write_bytes(packed)
        self.run("zstd", "-q", "-d", "-o", str(target), str(source))
        source.unlink()
        unpacked = target.read_bytes()
        target.unlink()
        return unpacked

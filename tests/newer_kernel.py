"""The guest with the kernel of Debian 12's backports, for what its own kernel was built without.

    image = newer_kernel.build(cache, guest_image.build(cache, say))

The root file system stays as it is: the modules that a test needs come with the initramfs, which
loads all of them. The package is fetched by apt-get with lists of its own, and only unpacked.
"""

import dataclasses
import fcntl
import lzma
import os
import shutil
import subprocess
from pathlib import Path

from demo import guest_image
from demo.guest_image import (
    DEBIAN_KEYRING, DRIVERS_KEPT, HERE, BuildError, Cpio, GuestImage, in_load_order,
)  # fmt: skip

SOURCE = f"deb [signed-by={DEBIAN_KEYRING}] http://deb.debian.org/debian bookworm-backports main\n"
# The package without a version is empty, and depends on the one with it.
PACKAGE = "linux-image-amd64"
MODULES = [*guest_image.MODULES_AT_BOOT, "virtio_net", "nvme_tcp"]
SECONDS_MAX = 300


def build(cache: Path, base: GuestImage) -> GuestImage:
    """Gives the guest, fetching its kernel first if it is not in the cache."""
    home = cache / "newer-kernel" / base.key
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(cache / "newer-kernel.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            for stale in home.parent.iterdir():
                shutil.rmtree(stale)
            work = home.with_suffix(".work")
            try:
                build_in(work, base)
                work.rename(home)  # only a whole one gets the final name
            finally:
                shutil.rmtree(work, ignore_errors=True)
    # QEMU starts a packed kernel, too; it only takes longer.
    return dataclasses.replace(base, kernel=home / "vmlinuz", initrd=home / "initrd")


def build_in(work: Path, base: GuestImage) -> None:
    files = work / "files"
    files.mkdir(parents=True)
    run("dpkg-deb", "--extract", str(fetch(work / "apt")), str(files))
    kernel = next((files / "boot").glob("vmlinuz-*"))
    release = kernel.name.removeprefix("vmlinuz-")
    modules = files / "lib/modules" / release
    prune(modules)
    run("depmod", "--basedir", str(files), release)
    (work / "initrd").write_bytes(initramfs(work, modules, base))
    kernel.rename(work / "vmlinuz")
    shutil.rmtree(files)
    shutil.rmtree(work / "apt")


def prune(modules: Path) -> None:
    """Leaves what a guest may need: depmod reads all that is there."""
    for driver in modules.glob("kernel/drivers/*"):
        if driver.name not in DRIVERS_KEPT:
            shutil.rmtree(driver)
    for driver in modules.glob("kernel/drivers/net/*"):
        if driver.is_dir():
            shutil.rmtree(driver)


def fetch(apt: Path) -> Path:
    for directory in ("lists/partial", "cache/archives/partial"):
        (apt / directory).mkdir(parents=True)
    (apt / "sources.list").write_text(SOURCE)
    options = {
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    run("apt-get", *words, "-qq", "update")
    found = run("apt-cache", *words, "depends", PACKAGE)
    named = [line.split()[-1] for line in found.splitlines() if "Depends:" in line]
    run("apt-get", *words, "-qq", "download", named[0], cwd=apt)
    return next(apt.glob("*.deb"))


def initramfs(work: Path, modules: Path, base: GuestImage) -> bytes:
    archive = Cpio()
    for name in ("dev", "sys", "root", "modules", "bin"):
        archive.add_directory(name)
    busybox = work / "busybox"
    run("debugfs", "-R", f"dump /bin/busybox {busybox}", str(base.root))
    archive.add_file("bin/busybox", busybox.read_bytes(), 0o755)
    archive.add_file("init", (HERE / "initramfs.sh").read_bytes(), 0o755)
    depends = modules / "modules.dep"
    depends.write_text(depends.read_text().replace(".ko.xz", ".ko"))
    for number, module in enumerate(in_load_order(modules, MODULES)):
        name = f"modules/{number:02}-{Path(module).name}"
        packed = (modules / f"{module}.xz").read_bytes()
        archive.add_file(name, lzma.decompress(packed), 0o644)
    return archive.finish()


def run(*command: str, cwd: Path | None = None) -> str:
    environment = os.environ | {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin", "LC_ALL": "C"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX
    )
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout

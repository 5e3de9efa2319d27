#!/bin/sh
# Installs what is missing, and only that; says nothing when all is there.
#
#   scripts/install.sh build    compiler, linker, and the Rust that rust-toolchain.toml names
#   scripts/install.sh demo     QEMU, and what makes the guest
#   scripts/install.sh test     what the tests and the checks need on top of both
#   scripts/install.sh qemu     a QEMU that moves guests under emulation, in the cache directory
#   scripts/install.sh lab      what studies measure with and against, and the command ashlar-lab
#
# For Debian 12 and Ubuntu 24.04, as root or with sudo. Takes a minute or two the first time.
# shellcheck disable=SC2086 # lists of packages are words on purpose
set -eu
cd "$(dirname "$0")/.."
PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH:/usr/sbin:/sbin"
export DEBIAN_FRONTEND=noninteractive

RUSTUP_INSTALLER=https://static.rust-lang.org/rustup/rustup-init.sh
CARGO_DENY_VERSION=0.20.2
BACKPORTS="http://deb.debian.org/debian bookworm-backports main"
DEBIAN_KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

packages_build="ca-certificates curl gcc libc6-dev"
packages_demo="debian-archive-keyring e2fsprogs gpg kmod mmdebstrap python3 qemu-system-x86 zstd"
packages_lab="btrfs-progs fio fonts-dejavu-core libharfbuzz-subset0 libpangoft2-1.0-0 mount
              postgresql procps python3-venv qemu-utils util-linux xfsprogs"
packages_qemu="qemu-system-common qemu-system-data qemu-system-x86"
packages_test="e2fsprogs fio git iproute2 libnbd-bin mount qemu-utils util-linux"

main() {
    [ $# -gt 0 ] || fail "say what for: build, demo, test, qemu or lab"
    for group in "$@"; do
        case $group in
            build) packages $packages_build; rust ;;
            demo) packages $packages_demo ;;
            test) packages $packages_build $packages_demo $packages_test; rust; cargo_deny ;;
            qemu) packages $packages_demo; newer_qemu ;;
            lab) without_server packages $packages_demo $packages_lab; lab_command ;;
            *) fail "there is no group $group: build, demo, test, qemu or lab" ;;
        esac
    done
}

packages() {
    missing=
    for package in "$@"; do
        installed "$package" || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null ||
        fail "this is not Debian or Ubuntu: install these with your package manager:$missing"
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null ||
        fail "there is no sudo: as root, run once: apt-get install$missing"
    echo "installing$missing"
    # A fresh machine may still be at its own first update: wait for the lock.
    apt="apt-get -qq -o DPkg::Lock::Timeout=600"
    update_lists
    quietly as_root $apt install -y --no-install-recommends $missing
}

# The lock on the lists is one that apt-get does not wait for by itself.
update_lists() {
    tries=60
    until as_root $apt update >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || quietly as_root $apt update
        sleep 10
    done
}

# PostgreSQL's package starts a server as it is installed: the lab starts its own, where it needs one.
without_server() {
    settings=/etc/postgresql-common/createcluster.d/ashlar-lab.conf
    if installed postgresql || ! command -v apt-get >/dev/null; then
        "$@"
        return
    fi
    as_root mkdir -p "${settings%/*}"
    echo "create_main_cluster = false" | as_root tee $settings >/dev/null
    "$@"
    as_root rm -f $settings
}

# The checkout itself, with the libraries that it names, in an environment of its own.
lab_command() {
    home=${ASHLAR_CACHE:-.cache}/lab-venv
    wanted=$(pwd)$(cksum <lab/pyproject.toml)
    [ "$(cat "$home/made-of" 2>/dev/null)" != "$wanted" ] || return 0
    echo "installing the lab's Python libraries"
    mkdir -p "${home%/*}"
    quietly python3 -m venv --clear "$home"
    quietly "$home/bin/pip" install --no-input --disable-pip-version-check -e lab
    echo "$wanted" >"$home/made-of"
}

installed() {
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo env DEBIAN_FRONTEND=noninteractive "$@"
    fi
}

# Of Debian's backports, beside the installed one and with its libraries: it is unpacked only.
newer_qemu() {
    mkdir -p "${ASHLAR_CACHE:-.cache}"
    home=$(cd "${ASHLAR_CACHE:-.cache}" && pwd)/qemu
    [ ! -x "$home/usr/bin/qemu-system-x86_64" ] || return 0
    echo "fetching a newer QEMU, for guests that are moved under emulation"
    work=$(mktemp -d "$home.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' INT TERM
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$work/root"
    echo "deb [arch=amd64 signed-by=$DEBIAN_KEYRING] $BACKPORTS" >"$work/sources.list"
    apt="apt-get -qq -o Dir::Etc::SourceList=$work/sources.list -o Dir::Etc::SourceParts=/dev/null
         -o Dir::State::Lists=$work/lists -o Dir::Cache=$work/cache -o APT::Sandbox::User=
         -o Acquire::Retries=2 -o Acquire::http::Timeout=30"
    # Without its lists apt says nothing of a mirror that cannot be reached.
    $apt update >/dev/null 2>&1 || true
    ls "$work"/lists/*Packages* >/dev/null 2>&1 || fail "Debian's backports cannot be reached"
    (cd "$work/debs" && quietly $apt download $packages_qemu)
    for file in "$work"/debs/*.deb; do
        quietly dpkg-deb -x "$file" "$work/root"
    done
    quietly "$work/root/usr/bin/qemu-system-x86_64" --version
    # Another one may have been as fast.
    [ -d "$home" ] || mv -T "$work/root" "$home"
}

rust() {
    pinned=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
    ! rust_is_there || return 0
    echo "installing Rust $pinned"
    if ! command -v rustup >/dev/null; then
        installer=$(mktemp)
        curl -sSf --proto '=https' --tlsv1.2 --retry 3 -o "$installer" "$RUSTUP_INSTALLER" ||
            fail "$RUSTUP_INSTALLER cannot be fetched: is there a way to the network?"
        quietly sh "$installer" -y --no-modify-path --profile minimal --default-toolchain none
        rm "$installer"
    fi
    quietly rustup toolchain install "$pinned" --profile minimal --component clippy,rustfmt
    rust_is_there || fail "Rust $pinned is installed, but another cargo comes first in PATH"
}

rust_is_there() {
    for tool in cargo "cargo clippy" "cargo fmt"; do
        RUSTUP_AUTO_INSTALL=0 $tool --version >/dev/null 2>&1 || return 1
    done
    case $(cargo --version) in
        "cargo $pinned "*) ;;
        *) return 1 ;;
    esac
}

cargo_deny() {
    case $(cargo deny --version 2>/dev/null) in
        "cargo-deny $CARGO_DENY_VERSION") return 0 ;;
    esac
    echo "building cargo-deny $CARGO_DENY_VERSION, once, for about two minutes"
    quietly cargo install --locked cargo-deny --version "$CARGO_DENY_VERSION"
}

# What a command says matters only when it fails.
quietly() {
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1 </dev/null; then
        tail -20 "$log" >&2
        fail "this failed: $* (its whole output: $log)"
    fi
    rm "$log"
}

fail() {
    echo "install: $*" >&2
    exit 1
}

main "$@"

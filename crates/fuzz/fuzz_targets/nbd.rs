//! A volume as a network block device, before clients that libFuzzer makes up.
#![cfg_attr(fuzzing, no_main)]
#![allow(clippy::unwrap_used, reason = "without an export nothing can be tried")]

use std::sync::LazyLock;

use ashlar_fuzz::served::{self, live_by};
use ashlar_target::nbd::{NbdExport, NbdSpec};
use ashlar_target::unix_socket::Access;

static EXPORT: LazyLock<NbdExport> = LazyLock::new(|| {
    let (name, socket) = ("disk".into(), Some(served::socket_path()));
    let (access, limits) = (Access::default(), served::limits());
    let spec = NbdSpec { name, socket, access, listen: None, limits };
    NbdExport::start(served::parts(), spec).unwrap()
});

fn live(input: &[u8]) {
    live_by(input, &*EXPORT, |choices| {
        ashlar_fuzz::nbd::live(&served::socket_path(), "disk", choices)
    });
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|input: &[u8]| live(input));

/// Lives once more by inputs that were kept: `cargo run -p ashlar-fuzz --bin nbd -- FILE...`
#[cfg(not(fuzzing))]
fn main() {
    std::env::args().skip(1).for_each(|file| live(&std::fs::read(file).unwrap()));
}

//! A volume as a guest's disk, before front ends and guests that libFuzzer makes up.
#![cfg_attr(fuzzing, no_main)]
#![allow(clippy::unwrap_used, reason = "without an export nothing can be tried")]

use std::sync::{LazyLock, Mutex, PoisonError};

use ashlar_fuzz::served::{self, live_by};
use ashlar_target::unix_socket::Access;
use ashlar_target::vhost::{ExportSpec, VhostExport};

/// One input at a time.
static EXPORT: LazyLock<Mutex<VhostExport>> = LazyLock::new(|| {
    let (name, serial) = ("disk".into(), "fuzz".into());
    let (socket, access) = (served::socket_path(), Access::default());
    let limits = served::limits();
    let spec = ExportSpec { name, socket, access, queues_max: 4, serial, limits, since: 0 };
    Mutex::new(VhostExport::start(served::parts(), spec).unwrap())
});

fn live(input: &[u8]) {
    let export = EXPORT.lock().unwrap_or_else(PoisonError::into_inner);
    live_by(input, &*export, |choices| ashlar_fuzz::vhost::live(&served::socket_path(), choices));
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|input: &[u8]| live(input));

/// Lives once more by inputs that were kept: `cargo run -p ashlar-fuzz --bin vhost -- FILE...`
#[cfg(not(fuzzing))]
fn main() {
    std::env::args().skip(1).for_each(|file| live(&std::fs::read(file).unwrap()));
}

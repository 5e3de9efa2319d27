//! A volume as a namespace of NVMe/TCP, before hosts that libFuzzer makes up.
#![cfg_attr(fuzzing, no_main)]
#![allow(clippy::unwrap_used, reason = "without an export nothing can be tried")]

use std::sync::LazyLock;

use ashlar_fuzz::nvme_tcp::HOST;
use ashlar_fuzz::served::{self, live_by};
use ashlar_reactor::nvme::chap::Secret;
use ashlar_target::nvme_tcp::{ExportSpec, NvmeTcpExport, Ports};
use ashlar_target::secrets::Secrets;

const SUBSYSTEM: &str = "nqn.2026-01.example:fuzz";

static SECRET: LazyLock<Secret> = LazyLock::new(|| Secret::generate(None).unwrap());
static EXPORT: LazyLock<NvmeTcpExport> = LazyLock::new(|| {
    let spec = ExportSpec {
        name: "disk".into(),
        listen: "127.0.0.1:0".parse().unwrap(),
        subsystem: SUBSYSTEM.into(),
        namespace: None,
        hosts: Vec::new(),
        queues_max: 4,
        atomic_bytes: 0,
        power: None,
        limits: served::limits(),
        secrets: Secrets { hosts: [(HOST.into(), SECRET.clone())].into(), subsystem: None },
    };
    NvmeTcpExport::start(&Ports::default(), served::parts(), spec).unwrap()
});

fn live(input: &[u8]) {
    live_by(input, &*EXPORT, |choices| {
        ashlar_fuzz::nvme_tcp::live(EXPORT.spec().listen, SUBSYSTEM, Some(&SECRET), choices)
    });
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|input: &[u8]| live(input));

/// Lives once more by inputs that were kept: `cargo run -p ashlar-fuzz --bin nvme_tcp -- FILE...`
#[cfg(not(fuzzing))]
fn main() {
    std::env::args().skip(1).for_each(|file| live(&std::fs::read(file).unwrap()));
}

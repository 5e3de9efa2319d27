//! `cargo xtask fuzz`: hostile clients of vhost-user, NVMe/TCP and NBD, for as long as is asked
//! for; by chance beside a guest that verifies, or with libFuzzer looking for new ways through one
//! of them.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::process::{Command, ExitCode, Stdio};

use clap::ValueEnum;

use crate::cargo;

/// The nightly compiler that has libFuzzer's instrumentation.
const TOOLCHAIN: &str = "nightly";
const DIRECTORY: &str = "crates/fuzz";
/// Bytes of memory drives, their parity, and what the fuzzer keeps itself.
const MEMORY_MIB_MAX: u32 = 4096;

/// A front end, by itself in the fuzzer's process.
#[derive(Clone, Copy, ValueEnum)]
pub enum Target {
    Vhost,
    #[value(name = "nvme_tcp")]
    NvmeTcp,
    Nbd,
}

/// `seed`: of an earlier run, to repeat it; else a new one, which the test by itself never takes.
pub fn run(seconds: u64, seed: Option<u64>) -> ExitCode {
    // Lives are counted on from it.
    let any = || RandomState::new().build_hasher().finish() >> 32 << 24;
    let seed = seed.unwrap_or_else(any);
    let mut test = cargo::command();
    test.args(["test", "--quiet", "--locked", "--package", "ashlar-control", "--test", "hostile"]);
    test.args(["--", "--nocapture"]).env("ASHLAR_FUZZ_SECONDS", seconds.to_string());
    test.env("ASHLAR_FUZZ_SEED", seed.to_string());
    cargo::run(&mut test)
}

/// What it finds is kept in `crates/fuzz/artifacts`, and what led it there in `corpus`.
pub fn run_guided(target: Target, seconds: u64) -> ExitCode {
    if !install() {
        return ExitCode::FAILURE;
    }
    let target = target.to_possible_value().expect("none is hidden");
    let mut fuzz = Command::new("rustup");
    fuzz.args(["run", TOOLCHAIN, "cargo", "fuzz", "run", "--fuzz-dir", DIRECTORY]);
    fuzz.args([target.get_name(), "--"]);
    fuzz.arg(format!("-max_total_time={seconds}"));
    fuzz.arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}"));
    cargo::run(&mut fuzz)
}

/// The compiler and cargo-fuzz, once.
fn install() -> bool {
    let has = |command: &mut Command| {
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let nightly = || {
        has(Command::new("rustup").args(["run", TOOLCHAIN, "rustc", "--version"]))
            || has(Command::new("rustup").args([
                "toolchain",
                "install",
                TOOLCHAIN,
                "--profile=minimal",
            ]))
    };
    let cargo_fuzz = || {
        has(cargo::command().args(["fuzz", "--version"]))
            || has(cargo::command().args(["install", "--locked", "--quiet", "cargo-fuzz"]))
    };
    let installed = nightly() && cargo_fuzz();
    if !installed {
        eprintln!("error: no {TOOLCHAIN} compiler, or no cargo-fuzz");
        eprintln!("fix: `rustup toolchain install {TOOLCHAIN}` and `cargo install cargo-fuzz`");
    }
    installed
}

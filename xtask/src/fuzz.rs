//! `cargo xtask fuzz`: hostile vhost-user front ends, for as long as is asked for.

use std::process::ExitCode;

use crate::cargo;

/// `seed`: of an earlier run, to repeat it.
pub fn run(seconds: u64, seed: Option<u64>) -> ExitCode {
    let mut test = cargo::command();
    test.args(["test", "--quiet", "--locked", "--package", "ashlar-control", "--test", "hostile"]);
    test.args(["--", "--nocapture"]).env("ASHLAR_FUZZ_SECONDS", seconds.to_string());
    test.envs(seed.map(|seed| ("ASHLAR_FUZZ_SEED", seed.to_string())));
    cargo::run(&mut test)
}

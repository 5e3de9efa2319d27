//! `cargo xtask fuzz`: hostile clients of every front end, for as long as is asked for.

use std::process::{Command, ExitCode};

/// `seed`: of an earlier run, to repeat it.
pub fn run(seconds: u64, seed: Option<u64>) -> ExitCode {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut test = Command::new(cargo);
    test.args(["test", "--quiet", "--locked", "--package", "ashlar-control", "--test", "hostile"]);
    test.args(["--", "--nocapture"]).env("ASHLAR_FUZZ_SECONDS", seconds.to_string());
    test.envs(seed.map(|seed| ("ASHLAR_FUZZ_SEED", seed.to_string())));
    match test.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cargo cannot be started: {error}");
            ExitCode::FAILURE
        }
    }
}

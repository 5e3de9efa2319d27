//! Runs the simulator, built for speed.

use std::process::{Command, ExitCode};

/// Passes `arguments` on to `ashlar-sim`.
pub fn run(arguments: &[String]) -> ExitCode {
    let status = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--release", "--package", "ashlar-sim", "--"])
        .args(arguments)
        .status();
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cargo cannot be run: {error}");
            ExitCode::FAILURE
        }
    }
}

//! `cargo xtask powercut`: builds the daemon for speed and cuts its power, again and again.
//!
//! The rounds are Python (`tests/powercut`). It takes the place of this process, so that Ctrl-C and
//! signals reach it, and nobody else has to end before it has cleaned up.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use crate::cargo;

pub fn run(arguments: &[String]) -> ExitCode {
    let built = cargo::command()
        .args(["build", "--quiet", "--release", "--locked", "--package", "ashlar-control"])
        .status();
    if !built.is_ok_and(|status| status.success()) {
        return ExitCode::FAILURE;
    }
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let error = Command::new("python3")
        .args(["-B", "-m", "tests.powercut"])
        .args(arguments)
        .current_dir(root)
        .exec();
    eprintln!("python3 cannot be started: {error}");
    ExitCode::FAILURE
}

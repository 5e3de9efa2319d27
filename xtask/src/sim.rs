//! `cargo xtask sim`: builds the simulator for speed and runs it with the given arguments.

use std::process::ExitCode;

use crate::cargo;

pub fn run(arguments: &[String]) -> ExitCode {
    let mut sim = cargo::command();
    sim.args(["run", "--quiet", "--release", "--package", "ashlar-sim", "--"]).args(arguments);
    cargo::run(&mut sim)
}

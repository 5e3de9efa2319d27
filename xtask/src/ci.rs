//! What CI runs: one list, run from the top, stopped at the first failure.

use std::process::{Command, ExitCode};

/// Fresh seeds each change; kept seeds and planted bugs are among the simulator's own tests.
const SIM_SEEDS: &str = "2000";

/// Name of a step, and its command line.
const STEPS: [(&str, &[&str]); 7] = [
    ("format", &["fmt", "--all", "--check"]),
    ("house rules", &["xtask", "tidy"]),
    ("clippy", &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]),
    (
        "licences and sources",
        &["deny", "--log-level", "error", "check", "bans", "licenses", "sources"],
    ),
    ("release build", &["build", "--release", "--workspace", "--locked"]),
    ("simulator", &["xtask", "sim", "--seeds", SIM_SEEDS]),
    // Last, so that the test runner's own summary ends the output.
    ("tests", &["test", "--workspace", "--locked"]),
];

/// Runs all steps. Each line of output belongs to the step whose name stands above it.
pub fn run() -> ExitCode {
    for (name, arguments) in STEPS {
        println!("── {name}: cargo {}", arguments.join(" "));
        let status = Command::new(env!("CARGO")).args(arguments).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("── {name} failed");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

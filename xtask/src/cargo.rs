//! Commands that run to their end: most are of the cargo that runs this.

use std::process::{Command, ExitCode};

pub fn command() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs it to its end.
pub fn run(command: &mut Command) -> ExitCode {
    match command.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            let program = command.get_program().display();
            eprintln!("{program} cannot be started: {error}");
            ExitCode::FAILURE
        }
    }
}

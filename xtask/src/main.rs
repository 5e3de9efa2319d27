//! Developer commands: `cargo xtask ci`, `cargo xtask test`, `cargo xtask tidy`,
//! `cargo xtask sim`, `cargo xtask fuzz`, `cargo xtask powercut`, `cargo xtask bench`.

mod cargo;
mod bench;
mod ci;
mod fuzz;
mod powercut;
mod sim;
mod test;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Developer commands of Ashlar")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything that CI checks, in the order of what fails fastest
    Ci {
        /// And then what takes a night: the same for longer, with other seeds each time
        #[arg(long)]
        nightly: bool,
    },
    /// All tests of the workspace, several programs side by side
    Test,
    /// The house rules that a machine can check: sizes, headers, names, layers, unsafe
    Tidy,
    /// The simulator: --seeds N [--start S], or --seed S to repeat one with its trace
    #[command(trailing_var_arg = true, allow_hyphen_values = true, disable_help_flag = true)]
    Sim {
        /// Passed on to `ashlar-sim`
        arguments: Vec<String>,
    },
    /// Hostile clients of vhost-user, NVMe/TCP and NBD, beside a guest that verifies what it reads
    Fuzz {
        /// For how long
        #[arg(long, default_value_t = 600)]
        seconds: u64,
        /// What an earlier run has printed, to repeat it
        #[arg(long)]
        seed: Option<u64>,
        /// Instead: one kind of export, with libFuzzer looking for new ways through it
        #[arg(long, conflicts_with = "seed")]
        guided: Option<fuzz::Target>,
    },
    /// Builds two commits and measures them in turns: REV_A REV_B -- OPTIONS of `bench engine`
    Bench {
        /// A commit, a branch or a tag
        rev_a: String,
        /// Another one
        rev_b: String,
        /// Passed on to `ashlar bench engine`
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Power cuts under a database in a virtual machine: [--rounds N] [--seed S] [--raw]
    #[command(trailing_var_arg = true, allow_hyphen_values = true, disable_help_flag = true)]
    Powercut {
        /// Passed on to `tests/powercut`
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Ci { nightly } => ci::run(nightly),
        Command::Test => test::run(),
        Command::Tidy => tidy::run(),
        Command::Sim { arguments } => sim::run(&arguments),
        Command::Fuzz { seconds, seed, guided: None } => fuzz::run(seconds, seed),
        Command::Fuzz { seconds, guided: Some(target), .. } => fuzz::run_guided(target, seconds),
        Command::Bench { rev_a, rev_b, arguments } => bench::run([&rev_a, &rev_b], &arguments),
        Command::Powercut { arguments } => powercut::run(&arguments),
    }
}

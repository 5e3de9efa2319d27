//! The simulator's command line: many seeds, one seed with a trace, or a planted bug to be found.

use std::process::ExitCode;

use ashlar_sim::batch;
use ashlar_sim::canary::Canary;
use ashlar_sim::faults::Plan;
use ashlar_sim::scenario::Options;
use clap::Parser;

/// Runs the whole engine in virtual time, with faults drawn from seeds.
#[derive(Parser)]
struct Arguments {
    /// How many seeds to run.
    #[arg(long, default_value_t = 200)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Repeats one seed and prints all that happens.
    #[arg(long, conflicts_with_all = ["seeds", "start"])]
    seed: Option<u64>,
    /// Plants a bug that must be found within the seeds.
    #[arg(long, value_enum)]
    canary: Option<Canary>,
    /// Goes on after a seed has failed.
    #[arg(long)]
    keep_going: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    batch::name_seed_in_panics();
    if let Some(seed) = arguments.seed {
        let plan = Plan::draw(seed);
        println!("seed {seed}: {}", plan.describe());
        let verdict = batch::run_caught(seed, Options { trace: true, canary: arguments.canary });
        println!("{verdict:?}");
        return if verdict.failure.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let mut failed = 0;
    for seed in arguments.start..arguments.start + arguments.seeds {
        let verdict = batch::run_caught(seed, Options { trace: false, canary: arguments.canary });
        if let Some(why) = verdict.failure {
            println!("seed {seed}: {why}");
            failed += 1;
            if !arguments.keep_going {
                break;
            }
        }
    }
    println!("{failed} failed");
    ExitCode::SUCCESS
}

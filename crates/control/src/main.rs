//! `ashlar`: the daemon, its API and its command line.
//!
//! The control plane plans and asks; it is never in the path of a guest's data. Modules from
//! lowest to highest; a module uses only those above it in this list.

mod size;
mod period;
mod level;
mod refusal;
mod topology;
mod placement;
mod name;
mod pci;
mod secret;
mod access;
mod remote;
mod api;
mod disk;
mod pages;
mod survey;
mod device;
mod power_cycle;
mod socket;
mod front;
mod history;
mod catalog;
mod machine;
mod engine;
mod snapshot;
mod takeover;
mod handover;
mod served;
mod host;
mod metrics;
mod server;
mod connections;
mod log;
mod daemon;
mod client;
mod inspect;
mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::complete_from_environment();
    cli::run(cli::Cli::read())
}

//! `ashlar`: the daemon, its API and its command line.
//!
//! The control plane plans and asks; it is never in the path of a guest's data.
//!
//! From lowest to highest, each using only those before it: size, refusal, name, api, pages,
//! survey, device, socket, catalog, engine, snapshot, vhost, host, server, daemon, client,
//! inspect, cli.

mod api;
mod catalog;
mod cli;
mod client;
mod daemon;
mod device;
mod engine;
mod host;
mod inspect;
mod name;
mod pages;
mod refusal;
mod server;
mod size;
mod snapshot;
mod socket;
mod survey;
mod vhost;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    cli::complete_from_environment();
    cli::run(cli::Cli::parse())
}

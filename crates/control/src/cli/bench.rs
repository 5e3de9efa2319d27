//! `ashlar bench …`: no daemon is asked; what is measured runs in this process, or at a socket.

mod drives;
mod options;
mod progress;
mod turns;

use std::path::{Path, PathBuf};

use ashlar_bench::engine::{self, EngineSpec};
use ashlar_bench::error::BenchError;
use ashlar_bench::report::{HEADS, Report};
use ashlar_bench::vhost::{self, InitiatorSpec, Neighbour};
use ashlar_target::export::ExportError;
use clap::{Args, Subcommand};

use crate::cli::bench::drives::Opened;
use crate::cli::bench::options::{ArrayOptions, InitiatorOptions, LoadOptions, NeighbourOptions};
use crate::cli::bench::progress::Progress;
use crate::cli::output::{Output, rows, show, table};
use crate::host::translate;
use crate::refusal::{Answer, Refusal};

#[derive(Subcommand)]
pub enum Command {
    /// Requests made in this process, on the core that serves them: nothing but the engine
    Engine(Box<Engine>),
    /// Requests made over vhost-user, as a guest's driver would, by a core of their own
    Vhost(Box<Vhost>),
}

#[derive(Args)]
pub struct Engine {
    #[command(flatten)]
    load: LoadOptions,
    #[command(flatten)]
    array: ArrayOptions,
    /// Another ashlar to compare with: both are run in turns, as programs of their own
    #[arg(long, value_name = "PROGRAM", value_hint = clap::ValueHint::ExecutablePath)]
    against: Option<PathBuf>,
}

#[derive(Args)]
pub struct Vhost {
    /// Socket of the back end (Ashlar, SPDK, qemu-storage-daemon); left out: an array of memory, a
    /// volume and an export are made in this process, on a core of their own
    // Here the daemon's socket has no meaning, so its name is free for this one: see `Cli::read`.
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    socket: Option<PathBuf>,
    /// Another socket to compare with, in turns
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    #[arg(requires = "socket")]
    against: Option<PathBuf>,
    #[command(flatten)]
    load: LoadOptions,
    #[command(flatten)]
    initiator: InitiatorOptions,
    #[command(flatten)]
    neighbour: NeighbourOptions,
    #[command(flatten)]
    array: ArrayOptions,
}

impl Command {
    /// `--socket` was not said of it: a default or the environment spoke of the daemon's.
    pub fn without_socket(&mut self) {
        match self {
            Command::Vhost(vhost) => vhost.socket = None,
            Command::Engine(_) => {}
        }
    }
}

pub fn run(command: Command, output: Output) -> Answer<()> {
    match command {
        Command::Engine(engine) => run_engine(&engine, output),
        Command::Vhost(vhost) => run_vhost(&vhost, output),
    }
}

fn run_engine(command: &Engine, output: Output) -> Answer<()> {
    let output = command.load.output(output);
    if let Some(other) = &command.against {
        return turns::programs(other, command.load.rounds_or(turns::ROUNDS_USUAL), output);
    }
    let asked = command.load.asked(1)?;
    let opened = Opened::open(&command.array)?;
    let under = command.array.under(&command.load, &opened)?;
    let spec = EngineSpec { cores: command.array.cores(), under, asked };
    let mut progress = Progress::new();
    let ran = engine::run(spec, &mut |event| progress.update(&event));
    progress.end();
    // Also what a failed run left behind.
    opened.wipe()?;
    let report = ran.map_err(refusal)?;
    show(output, &report, text)
}

fn run_vhost(command: &Vhost, output: Output) -> Answer<()> {
    let Vhost { socket, against, load, initiator, neighbour, array } = command;
    let output = load.output(output);
    let Some(socket) = socket else {
        return run_own(command, output);
    };
    if let Some(option) = array.first_given() {
        return Err(Refusal::invalid(format!("{option} is for an array that is made here"))
            .fix(format!("leave {option} or --socket out")));
    }
    if (load.writes() || initiator.writes()) && !array.force {
        let shown = socket.display();
        return Err(Refusal::conflict(format!(
            "what the disk at {shown} holds would be overwritten"
        ))
        .fix(
            "if it may be lost, use --force; if not, use --rw randread without --verify and --fill",
        ));
    }
    let spec = initiator.spec(load, load.asked(1)?, array.core());
    if let Some(other) = against {
        let rounds = load.rounds_or(turns::ROUNDS_USUAL);
        return turns::sockets([socket, other], &spec, rounds, output);
    }
    if let Some(noisy) = neighbour.noisy(&spec) {
        let rounds = load.rounds_or(turns::ROUNDS_USUAL);
        return turns::neighbours(socket, &spec, noisy, rounds, output);
    }
    let report = at_socket(socket, &spec, None)?;
    show(output, &report, text)
}

fn run_own(command: &Vhost, output: Output) -> Answer<()> {
    let Vhost { load, initiator, array, .. } = command;
    let core = array.core();
    let spec = initiator.spec(load, load.asked(1)?, core);
    if array.cores().contains(&spec.core) {
        let shared = spec.core;
        eprintln!("note: initiator and back end share CPU {shared}: the figures mean little");
    }
    let opened = Opened::open(array)?;
    let under = array.under(load, &opened)?;
    let mut progress = Progress::new();
    let ran = vhost::run_own(&array.cores(), under, &spec, &mut |event| progress.update(&event));
    progress.end();
    opened.wipe()?;
    show(output, &ran.map_err(refusal)?, text)
}

fn at_socket(
    socket: &Path,
    spec: &InitiatorSpec,
    neighbour: Option<Neighbour<'_>>,
) -> Answer<Report> {
    let mut progress = Progress::new();
    let ran = vhost::run_at(socket, spec, neighbour, &mut |event| progress.update(&event));
    progress.end();
    ran.map_err(refusal)
}

/// What people see of a report.
fn text(report: &Report) -> String {
    let mut shown = table(&HEADS);
    shown.add_rows(report.rows());
    let mut lines = report.lines();
    lines.insert(1.min(lines.len()), rows(&shown, "no requests were measured"));
    lines.join("\n")
}

/// What could not be measured, in words for the operator.
fn refusal(error: BenchError) -> Refusal {
    let text = error.to_string();
    match error {
        BenchError::Spec { error, fix } => Refusal::invalid(error).fix(fix),
        BenchError::Core(_) => Refusal::failed(text).fix("see --core and --client-core"),
        BenchError::Change(error) => translate::change("bench", "create", &error),
        BenchError::Pool(error) => translate::pool(&error),
        BenchError::Mismatch(_) => Refusal::failed(text)
            .fix("it is a bug of what was measured, or of its drives: keep the command line"),
        BenchError::BackEnd { error, fix: Some(fix) } => Refusal::failed(error).fix(fix),
        BenchError::BackEnd { error, fix: None } => Refusal::failed(error),
        BenchError::Export(ExportError::Spec(_)) => {
            Refusal::invalid(text).fix("use fewer --queues")
        }
        BenchError::Export(_)
        | BenchError::Request { .. }
        | BenchError::System { .. }
        | BenchError::ReactorEnded => Refusal::failed(text),
    }
}

//! The command line: what can be said, and what is done about it.

mod array;
mod bench;
mod complete;
mod drive;
mod export;
mod follow;
mod inspect;
mod output;
mod scrub;
mod settings;
mod spare;
mod status;
mod top;
mod traffic;
mod upgrade;
mod volume;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use ashlar_reactor::nvme::chap;
use ashlar_reactor::uring;
use clap::parser::ValueSource;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use uuid::Uuid;
use zeroize::Zeroizing;

use crate::client::Client;
use crate::daemon::{self, CpuList, Settings};
use crate::handover::CONSENT;
use crate::log;
use crate::refusal::{Answer, Refusal};
use crate::server;

pub use complete::complete_from_environment;
use output::{Output, complain, say};

const POLL_US_DEFAULT: u64 = 100;

/// RAID for NVMe drives in user space, for virtual machines.
///
/// `ashlar serve` is the daemon; everything else asks it, over its socket.
#[derive(Parser)]
#[command(name = "ashlar", version, max_term_width = 100)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    /// The daemon's socket
    #[arg(long, global = true, env = "ASHLAR_SOCKET", value_name = "PATH")]
    #[arg(default_value = "/run/ashlar/ashlar.sock", hide_env_values = true)]
    socket: PathBuf,
    /// Tables for people, JSON for programs
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the daemon
    Serve(Serve),
    /// Everything on one screen
    Status(status::Status),
    /// What is asked of arrays and exports, again and again
    Top(top::Top),
    /// Everything that is counted, as Prometheus reads it
    ///
    /// Prometheus cannot ask the daemon's Unix socket by itself: put a proxy before its
    /// `GET /metrics`, or write this to a file for the node exporter's textfile collector
    /// (`ashlar metrics > FILE.prom`).
    Metrics,
    /// Drives: files, block devices, memory
    #[command(subcommand)]
    Drive(drive::Command),
    /// Arrays of drives
    #[command(subcommand)]
    Array(array::Command),
    /// Spares: drives that take over when members fail
    #[command(subcommand)]
    Spare(spare::Command),
    /// Volumes on arrays
    #[command(subcommand)]
    Volume(volume::Command),
    /// Volumes offered to guests
    #[command(subcommand)]
    Export(export::Command),
    /// Let another program, or a newer file of this one, take the daemon's place
    ///
    /// Guests stay connected and wait for a moment. A program that cannot take over is refused
    /// before anything is stopped.
    Upgrade(upgrade::Upgrade),
    /// Measure the engine, or a vhost-user back end, without a daemon
    #[command(subcommand)]
    Bench(bench::Command),
    /// Read the labels of a drive, without a daemon
    Inspect(inspect::Inspect),
    /// Make a secret that a host and a subsystem share (DH-HMAC-CHAP), and print it
    ///
    /// `(umask 077; ashlar gen-secret > FILE)` keeps it from others. Options that take a file take
    /// this one; a Linux host takes it by `nvme connect --dhchap-secret`.
    GenSecret {
        /// The hash by which the name of its owner goes into the key
        #[arg(long, value_enum, default_value_t = SecretHash::Sha256)]
        hash: SecretHash,
    },
    /// Print the OpenAPI document of the daemon's API
    Openapi,
    /// Print what makes a shell complete commands and names
    Completions {
        /// Source its output: `source <(ashlar completions bash)`
        shell: Shell,
    },
    /// Write the manual pages
    Man {
        /// Directory for them; made if it is missing
        directory: PathBuf,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Clone, Copy, ValueEnum)]
enum SecretHash {
    None,
    Sha256,
    Sha384,
    Sha512,
}

#[derive(Args)]
struct Serve {
    /// Directory for what shall survive a restart: attached drives, known arrays, exports
    #[arg(long, default_value = "/var/lib/ashlar", value_name = "DIR")]
    state: PathBuf,
    /// CPUs that run reactors, such as 0 or 2,4-7; left out: the first that may be used
    #[arg(long, value_name = "LIST")]
    cores: Option<CpuList>,
    /// Microseconds that an idle reactor looks for work before it sleeps
    #[arg(long, default_value_t = POLL_US_DEFAULT, value_name = "US")]
    poll_us: u64,
    /// A thread of the kernel takes what is submitted (io_uring's SQPOLL): no system call for it,
    /// but a CPU more for each reactor while it is busy
    #[arg(long)]
    sqpoll: bool,
    /// Wait for the interrupts of drives that could be polled (io_uring's IOPOLL), too
    #[arg(long)]
    no_iopoll: bool,
    /// Give NVMe drives of the kernel commands past its block layer (io_uring's URING_CMD), where
    /// that works; `ashlar drive show` says where
    #[arg(long)]
    passthrough: bool,
    /// Who this host is to others that reach its drives; left out: made from /etc/machine-id and
    /// the host's name
    #[arg(long, value_name = "UUID", value_parser = host_id)]
    host_id: Option<Uuid>,
    /// Another process hands over on the standard input
    #[arg(long, hide = true)]
    handed_over: bool,
    /// Only say whether what is handed over in this format would be taken
    #[arg(long, hide = true, value_name = "FORMAT")]
    check_handover: Option<u32>,
}

fn host_id(text: &str) -> Result<Uuid, String> {
    let uuid = Uuid::try_parse(text).ok().filter(|uuid| !uuid.is_nil());
    uuid.ok_or_else(|| "use a uuid that is not zero".to_owned())
}

impl Cli {
    /// What was said on the command line; ends the program where that makes no sense.
    ///
    /// The daemon's socket is an option of every command, with a default and a variable of the
    /// environment. Where a command has a socket of its own, only what was said there counts.
    pub fn read() -> Cli {
        let matches = Cli::command().get_matches();
        let mut last = &matches;
        while let Some((_, inner)) = last.subcommand() {
            last = inner;
        }
        let said = last.value_source("socket") == Some(ValueSource::CommandLine);
        let mut cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
        if let Command::Bench(command) = &mut cli.command
            && !said
        {
            command.without_socket();
        }
        cli
    }
}

/// Does what was asked for. Errors go to stderr, in the form of `output`; the status is 1 for them.
pub fn run(cli: Cli) -> ExitCode {
    let Cli { socket, output, command } = cli;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = match runtime {
        Ok(runtime) => {
            let done = runtime.block_on(dispatch(command, socket, output));
            // A thread that waits for a dead disk must not keep us.
            runtime.shutdown_background();
            done
        }
        Err(error) => Err(Refusal::failed(format!("no runtime: {error}"))),
    };
    match done {
        Ok(code) => code,
        Err(refusal) => {
            complain(output, &refusal.error, refusal.fix.as_deref());
            ExitCode::FAILURE
        }
    }
}

async fn dispatch(command: Command, socket: PathBuf, output: Output) -> Answer<ExitCode> {
    let client = Client::new(&socket);
    match command {
        Command::Serve(serve) => run_daemon(serve, socket).await?,
        Command::Status(status) => status::run(status, &client, output).await?,
        Command::Top(top) => top::run(&top, &client, output).await?,
        Command::Metrics => say(client.get_text("/metrics").await?.trim_end())?,
        Command::Drive(command) => drive::run(command, &client, output).await?,
        Command::Array(command) => return array::run(command, &client, output).await,
        Command::Spare(command) => spare::run(command, &client, output).await?,
        Command::Volume(command) => volume::run(command, &client, output).await?,
        Command::Export(command) => export::run(command, &client, output).await?,
        Command::Upgrade(upgrade) => upgrade::run(upgrade, &client, output).await?,
        Command::Bench(command) => bench::run(command, output)?,
        Command::Inspect(command) => inspect::run(&command, output)?,
        Command::GenSecret { hash } => say(&make_secret(hash)?)?,
        Command::Openapi => output::json(&server::openapi())?,
        Command::Completions { shell } => complete::print_registration(shell)?,
        Command::Man { directory } => write_manual(&directory)?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn run_daemon(serve: Serve, socket: PathBuf) -> Answer<()> {
    if let Some(format) = serve.check_handover {
        daemon::check_handover(format, &serve.state)?;
        return say(&format!("{CONSENT}{}", env!("CARGO_PKG_VERSION")));
    }
    log::start();
    daemon::serve(Settings {
        state: serve.state,
        socket,
        cores: serve.cores,
        poll_window: Duration::from_micros(serve.poll_us),
        io_uring: uring::Settings {
            sqpoll: serve.sqpoll,
            iopoll: !serve.no_iopoll,
            passthrough: serve.passthrough,
        },
        host_id: serve.host_id,
        handed_over: serve.handed_over,
    })
    .await
}

fn make_secret(hash: SecretHash) -> Answer<Zeroizing<String>> {
    let by = match hash {
        SecretHash::None => None,
        SecretHash::Sha256 => Some(chap::Hash::Sha256),
        SecretHash::Sha384 => Some(chap::Hash::Sha384),
        SecretHash::Sha512 => Some(chap::Hash::Sha512),
    };
    let made = chap::Secret::generate(by);
    let made = made.map_err(|error| Refusal::failed(format!("no random numbers: {error}")))?;
    Ok(made.to_text())
}

fn write_manual(directory: &std::path::Path) -> Answer<()> {
    let written = std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), directory));
    written.map_err(|error| {
        Refusal::failed(format!("{} cannot be written: {error}", directory.display()))
    })?;
    say(&format!("manual pages written to {}", directory.display()))
}

//! `ashlar export …`

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use clap_complete::engine::ArgValueCandidates;

use crate::api::Done;
use crate::api::export::{Export, ExportCreate, ExportKind, ExportPart, ExportState};
use crate::cli::complete;
use crate::cli::drive::with_notes;
use crate::cli::output::{Output, listed, or_dash, rows, say, show, table};
use crate::cli::traffic;
use crate::client::{Client, path_of};
use crate::daemon::CpuList;
use crate::refusal::{Answer, Refusal};
use crate::size::Size;

#[derive(Subcommand)]
pub enum Command {
    /// Offer a volume to a guest
    Create(Create),
    /// Withdraw an export
    Delete {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::exports))]
        name: String,
        /// Also if a guest uses it: its disk goes away
        #[arg(long)]
        force: bool,
    },
    /// All exports
    List,
    /// One export
    Show {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::exports))]
        name: String,
        /// Only the options that give it to a QEMU guest
        #[arg(long)]
        qemu: bool,
    },
}

#[derive(Args)]
pub struct Create {
    /// Name of the new export
    name: String,
    /// VOLUME, or ARRAY/VOLUME
    #[arg(long, add = ArgValueCandidates::new(complete::volumes))]
    volume: String,
    /// The protocol
    #[arg(long, value_enum, default_value_t)]
    kind: ExportKind,
    /// The socket; left out: export/NAME.sock beside the daemon's socket
    #[arg(long, value_hint = clap::ValueHint::FilePath)]
    path: Option<PathBuf>,
    /// Most queues a guest may use
    #[arg(long)]
    queues: Option<u16>,
    /// CPUs of reactors that serve its queues in turn, such as 2,4-5; left out: those that share
    /// a cache with the array's reactor, or its node
    #[arg(long, value_name = "LIST")]
    cores: Option<CpuList>,
}

pub async fn run(command: Command, client: &Client, output: Output) -> Answer<()> {
    match command {
        Command::Create(create) => {
            let export: Export = client.post("/v1/exports", &create.request()?).await?;
            show(output, &export, |export| {
                let qemu = export.qemu.as_ref();
                let qemu =
                    qemu.map(|its| format!("\nfor QEMU (size= is the guest's memory):\n  {its}"));
                format!("{}{}", export.place, qemu.unwrap_or_default())
            })
        }
        Command::Delete { name, force } => {
            let path = format!("{}?force={force}", path_of("exports", &name));
            let done: Done = client.delete(&path).await?;
            show(output, &done, |done| with_notes(&format!("export {name} deleted"), &done.notes))
        }
        Command::List => {
            let exports: Vec<Export> = client.get("/v1/exports").await?;
            show(output, &exports, |exports| exports_table(exports))
        }
        Command::Show { name, qemu } => {
            let export: Export = client.get(&path_of("exports", &name)).await?;
            if qemu {
                let none = || Refusal::invalid(format!("{name} is no export for a QEMU guest"));
                say(&export.qemu.ok_or_else(none)?);
                return Ok(());
            }
            show(output, &export, details)
        }
    }
}

impl Create {
    fn request(self) -> Answer<ExportCreate> {
        let socket = match self.path {
            Some(path) => Some(std::path::absolute(&path).map_err(|error| {
                Refusal::invalid(format!("{} is no path: {error}", path.display()))
            })?),
            None => None,
        };
        let Create { name, volume, kind, queues, cores, .. } = self;
        let cores = cores.map(|CpuList(cpus)| cpus);
        Ok(ExportCreate { name, volume, kind, socket, queues, cores })
    }
}

fn state(export: &Export) -> &'static str {
    match export.state {
        ExportState::Listening => "listening",
        ExportState::Connected => "connected",
        ExportState::Down => "down",
    }
}

pub fn exports_table(exports: &[Export]) -> String {
    let mut shown = table(&["NAME", "STATE", "VOLUME", "QUEUES>", "READ>", "WRITTEN>", "PLACE"]);
    for export in exports {
        shown.add_row([
            export.name.clone(),
            state(export).to_owned(),
            export.volume.clone(),
            queues(export, "/"),
            Size(export.counters.read_bytes).to_string(),
            Size(export.counters.write_bytes).to_string(),
            export.place.clone(),
        ]);
    }
    rows(&shown, "no exports; `ashlar export create NAME --volume VOLUME` makes one")
}

/// As it is written in `--kind`.
fn kind(kind: ExportKind) -> String {
    kind.to_possible_value().map_or_else(String::new, |its| its.get_name().to_owned())
}

/// Those in use, and how many there may be.
fn queues(export: &Export, of: &str) -> String {
    let most = export.queues.map(|most| format!("{of}{most}"));
    format!("{}{}", export.queues_active, most.unwrap_or_default())
}

/// `CPU 0 (2 queues), CPU 1 (2 queues)`
fn parts(export: &Export) -> String {
    let part = |its: &ExportPart| format!("CPU {} ({} queues)", its.cpu, its.queues_active);
    listed(&export.parts.iter().map(part).collect::<Vec<_>>())
}

fn details(export: &Export) -> String {
    let its = &export.counters;
    let mut lines = vec![
        format!("name      {}", export.name),
        format!("state     {}", state(export)),
        format!("volume    {}/{}", export.array, export.volume),
        format!("kind      {}", kind(export.kind)),
        format!("place     {}", export.place),
        format!("serial    {}", or_dash(export.serial.as_ref())),
        format!("queues    {}", queues(export, " in use of ")),
        format!("cores     {}", parts(export)),
        format!("reads     {} ({})", its.reads, Size(its.read_bytes)),
        format!("writes    {} ({})", its.writes, Size(its.write_bytes)),
        format!("flushes   {}", its.flushes),
        format!("discards  {}", its.discards),
        format!("errors    {}", its.errors),
    ];
    lines.extend(export.traffic.iter().flat_map(|its| traffic::lines(its, 10)));
    lines.extend(export.error.as_ref().map(|error| format!("error     {error}")));
    lines.extend(export.qemu.as_ref().map(|qemu| format!("qemu      {qemu}")));
    lines.join("\n")
}

//! `ashlar drive …`

use std::path::Path;

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;

use crate::api::Done;
use crate::api::drive::{Drive, DriveAttach, DriveHealth, DriveKind, DriveSource, DriveState};
use crate::cli::complete;
use crate::cli::output::{Output, or_dash, rows, show, table};
use crate::client::{Client, path_of};
use crate::refusal::{Answer, Refusal};
use crate::size::Size;

#[derive(Subcommand)]
pub enum Command {
    /// Take a drive into the daemon's hands
    Attach(Attach),
    /// Let a drive go
    Detach {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::drives))]
        name: String,
        /// Also if a running array uses it: the drive is pulled
        #[arg(long)]
        force: bool,
    },
    /// All drives
    List,
    /// One drive
    Show {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::drives))]
        name: String,
    },
}

#[derive(Args)]
pub struct Attach {
    /// A block device, a file, or ram:SIZE (memory, for measuring)
    #[arg(value_hint = clap::ValueHint::FilePath)]
    path: String,
    /// Its name; left out: made from the path
    #[arg(long)]
    name: Option<String>,
    /// Make a file of this size if there is none; its space is taken as it is written
    #[arg(long)]
    size: Option<Size>,
    /// Take a drive that carries data; an array that uses the drive overwrites the data
    #[arg(long)]
    force: bool,
}

pub async fn run(command: Command, client: &Client, output: Output) -> Answer<()> {
    match command {
        Command::Attach(attach) => {
            let drive: Drive = client.post("/v1/drives", &attach.request()?).await?;
            show(output, &drive, |drive| {
                let (bytes, content) = (drive.bytes.unwrap_or(0), or_dash(drive.content.as_ref()));
                let line = format!("drive {} attached: {}, {content}", drive.name, Size(bytes));
                with_notes(&line, &hint(drive))
            })
        }
        Command::Detach { name, force } => {
            let path = format!("{}?force={force}", path_of("drives", &name));
            let done: Done = client.delete(&path).await?;
            show(output, &done, |done| with_notes(&format!("drive {name} detached"), &done.notes))
        }
        Command::List => {
            let drives: Vec<Drive> = client.get("/v1/drives").await?;
            show(output, &drives, |drives| drives_table(drives))
        }
        Command::Show { name } => {
            let drive: Drive = client.get(&path_of("drives", &name)).await?;
            show(output, &drive, details)
        }
    }
}

impl Attach {
    fn request(self) -> Answer<DriveAttach> {
        Ok(DriveAttach {
            source: source(&self.path)?,
            name: self.name,
            size_bytes: self.size.map(|size| size.0),
            force: self.force,
        })
    }
}

/// A path of this command's directory, or memory.
fn source(text: &str) -> Answer<DriveSource> {
    if let Some(size) = text.strip_prefix("ram:") {
        let size: Size = size.parse().map_err(|error| {
            Refusal::invalid(format!("{error}")).fix("write ram:SIZE, such as ram:512M")
        })?;
        return Ok(DriveSource::Ram(size.0));
    }
    let path = std::path::absolute(Path::new(text))
        .map_err(|error| Refusal::invalid(format!("{text:?} is no path: {error}")))?;
    Ok(DriveSource::Path(path))
}

/// What can be done with a drive that is, or was, a member.
fn hint(drive: &Drive) -> Vec<String> {
    let hint = |array: &String| {
        format!(
            "`ashlar array start --scan` starts its array; `ashlar array rebuild {array}` takes \
             the drive back into the running one"
        )
    };
    drive.array.iter().map(hint).collect()
}

/// A line, and what the operator should know under it.
pub fn with_notes(line: &str, notes: &[String]) -> String {
    let notes = notes.iter().map(|note| format!("\nnote: {note}"));
    format!("{line}{}", notes.collect::<String>())
}

pub fn drives_table(drives: &[Drive]) -> String {
    let mut shown = table(&["NAME", "STATE", "SIZE>", "ARRAY", "MEMBER>", "HEALTH", "SOURCE"]);
    for drive in drives {
        shown.add_row([
            drive.name.clone(),
            state(drive).to_owned(),
            or_dash(drive.bytes.map(Size)),
            or_dash(drive.array.as_ref()),
            or_dash(drive.member),
            or_dash(drive.health.map(health_name)),
            drive.source.to_string(),
        ]);
    }
    rows(&shown, "no drives; `ashlar drive attach PATH` adds one")
}

fn state(drive: &Drive) -> &'static str {
    match drive.state {
        // It cannot be used for anything new without --force.
        DriveState::Free if drive.array.is_some() => "labelled",
        DriveState::Free => "free",
        DriveState::Member => "member",
        DriveState::Missing => "missing",
    }
}

pub fn health_name(health: DriveHealth) -> &'static str {
    match health {
        DriveHealth::Healthy => "healthy",
        DriveHealth::Suspect => "suspect",
        DriveHealth::Failed => "failed",
    }
}

fn details(drive: &Drive) -> String {
    let kind = drive.kind.map(|kind| match kind {
        DriveKind::File => "file",
        DriveKind::BlockDevice => "block device",
        DriveKind::Ram => "memory",
    });
    let mut lines = vec![
        format!("name      {}", drive.name),
        format!("source    {}", drive.source),
        format!("state     {}", state(drive)),
        format!("kind      {}", or_dash(kind)),
        format!("size      {}", or_dash(drive.bytes.map(Size))),
        format!("sector    {}", or_dash(drive.sector_bytes.map(|bytes| Size(bytes.into())))),
        format!("content   {}", or_dash(drive.content.as_ref())),
        format!("uuid      {}", or_dash(drive.uuid)),
        format!("array     {}", or_dash(drive.array.as_ref())),
        format!("member    {}", or_dash(drive.member)),
        format!("health    {}", or_dash(drive.health.map(health_name))),
    ];
    if let Some(its) = &drive.counters {
        let (read, written) = (Size(its.read_bytes), Size(its.write_bytes));
        lines.push(format!("reads     {} ({read}), {} failed", its.reads, its.read_errors));
        lines.push(format!("writes    {} ({written}), {} failed", its.writes, its.write_errors));
        lines.push(format!("flushes   {}", its.flushes));
    }
    lines.extend(drive.error.as_ref().map(|error| format!("error     {error}")));
    lines.join("\n")
}

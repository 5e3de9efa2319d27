//! `ashlar drive …`

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;

use crate::api::Done;
use crate::api::array::{Array, ArrayState};
use crate::api::drive::{
    Drive, DriveAttach, DriveHealth, DriveHistory, DriveKind, DriveModel, DriveQueue, DriveSource,
    DriveState, LatencySummary, PathState, RemotePath, Used,
};
use crate::api::traffic::Traffic;
use crate::cli::complete;
use crate::cli::output::{Output, ago, or_dash, rows, show, table, time};
use crate::cli::traffic::megabytes;
use crate::client::{Client, path_of};
use crate::refusal::{Answer, Refusal};
use crate::remote::SCHEME;
use crate::secret::Secret;
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
    /// Forget what went wrong with a drive: it is trusted again
    Clear {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::drives))]
        name: String,
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
    /// A block device, a file, pci:ADDRESS, nvme-tcp://HOST/NQN, or ram:SIZE (memory, to measure)
    ///
    /// pci:0000:03:00.0 is an NVMe drive that the daemon drives itself, past the kernel. The kernel
    /// has to let it go first: `driverctl set-override 0000:03:00.0 vfio-pci`. What is on the drive
    /// is the same either way.
    ///
    /// nvme-tcp://HOST[:PORT]/NQN[?nsid=N] is a namespace of another host, by NVMe/TCP; the port is
    /// 4420 and the namespace 1, unless said otherwise. With &hdgst=1&ddgst=1 headers and data have
    /// digests, against what TCP does not notice. nvme-tcp://HOST alone is refused with the list of
    /// what that host offers. Arrays may have such drives beside others; one that is away for 8
    /// seconds is missing, and taken back when it is there again.
    ///
    /// Two more kinds are for tests:
    ///
    /// lossy:PATH is a file or block device under a volatile cache. What is written reaches it with
    /// a flush; before that, some of it may, in no order. So killing the daemon (`kill -9`) is a
    /// power cut for this drive. Zeroing is not cached.
    ///
    /// model:SIZE,iops=N,mbps=N[,latency-us=N] is memory at the pace of such a drive: N operations
    /// or N times 10^6 bytes a second, whichever takes longer, and each answered N microseconds
    /// after its turn. Reads and writes share that.
    #[arg(value_hint = clap::ValueHint::FilePath)]
    path: String,
    /// Its name; left out: made from the path
    #[arg(long)]
    name: Option<String>,
    /// Make a file of this size if there is none; its space is taken as it is written
    #[arg(long)]
    size: Option<Size>,
    /// Take a drive that carries data, and wipe it; one with a good array label is left as it is
    #[arg(long)]
    force: bool,
    /// Its file was cut short once, and all of it is again as it was: believe what it holds
    #[arg(long, conflicts_with = "force")]
    whole: bool,
    /// nvme-tcp: this host's secret there, where the target wants a proof (DH-HMAC-CHAP): a file
    /// with one line, as `ashlar gen-secret` makes it
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    secret: Option<PathBuf>,
    /// nvme-tcp: the subsystem's secret, which it has to prove before the drive is used
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, requires = "secret")]
    controller_secret: Option<PathBuf>,
}

pub async fn run(command: Command, client: &Client, output: Output) -> Answer<()> {
    match command {
        Command::Attach(attach) => {
            let drive: Drive = client.post("/v1/drives", &attach.request()?).await?;
            let array = array_of(&drive, client).await;
            show(output, &drive, |drive| {
                let (bytes, content) = (drive.bytes.unwrap_or(0), or_dash(drive.content.as_ref()));
                let line = format!("drive {} attached: {}, {content}", drive.name, Size(bytes));
                let hint = drive.array.as_ref().map(|name| hint(drive.state, name, array.as_ref()));
                with_notes(&line, hint.as_slice())
            })
        }
        Command::Detach { name, force } => {
            let path = format!("{}?force={force}", path_of("drives", &name));
            let done: Done = client.delete(&path).await?;
            show(output, &done, |done| with_notes(&format!("drive {name} detached"), &done.notes))
        }
        Command::Clear { name } => {
            let path = format!("{}/clear", path_of("drives", &name));
            let drive: Drive = client.post(&path, &()).await?;
            show(output, &drive, |drive| {
                format!("what went wrong with drive {} is forgotten", drive.name)
            })
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
            secret: read_secret(self.secret.as_deref())?,
            controller_secret: read_secret(self.controller_secret.as_deref())?,
            source: source(&self.path)?,
            name: self.name,
            size_bytes: self.size.map(|size| size.0),
            force: self.force,
            whole: self.whole,
        })
    }
}

/// The secret in a file, if one was named; a remark goes to who named it.
pub fn read_secret(path: Option<&Path>) -> Answer<Option<Secret>> {
    let Some(path) = path else { return Ok(None) };
    let (secret, note) = Secret::read(path)?;
    note.into_iter().for_each(|note| eprintln!("note: {note}"));
    Ok(Some(secret))
}

/// A path of this command's directory, or memory.
fn source(text: &str) -> Answer<DriveSource> {
    if let Some(text) = text.strip_prefix("model:") {
        let model = model(text).ok_or_else(|| {
            Refusal::invalid(format!("{text:?} describes no drive"))
                .fix("write model:SIZE,iops=N,mbps=N or model:SIZE,iops=N,mbps=N,latency-us=N")
        })?;
        return Ok(DriveSource::Model(model));
    }
    if let Some(address) = text.strip_prefix("pci:") {
        let address = address.parse().map_err(|error: String| {
            Refusal::invalid(error).fix("write pci:DOMAIN:BUS:DEVICE.FUNCTION, as `lspci -D` does")
        })?;
        return Ok(DriveSource::Pci(address));
    }
    if text.starts_with(SCHEME) {
        let address = text.parse().map_err(|error: String| {
            Refusal::invalid(error).fix(format!("write {SCHEME}HOST:PORT/NQN?nsid=N"))
        })?;
        return Ok(DriveSource::NvmeTcp(address));
    }
    if let Some(path) = text.strip_prefix("lossy:") {
        return Ok(DriveSource::Lossy(absolute(path)?));
    }
    if let Some(size) = text.strip_prefix("ram:") {
        let size: Size = size.parse().map_err(|error| {
            Refusal::invalid(format!("{error}")).fix("write ram:SIZE, such as ram:512M")
        })?;
        return Ok(DriveSource::Ram(size.0));
    }
    Ok(DriveSource::Path(absolute(text)?))
}

fn absolute(text: &str) -> Answer<PathBuf> {
    std::path::absolute(Path::new(text))
        .map_err(|error| Refusal::invalid(format!("{text:?} is no path: {error}")))
}

/// `1G,iops=500000,mbps=6000,latency-us=80`: each number at most once, in any order.
fn model(text: &str) -> Option<DriveModel> {
    let mut parts = text.split(',');
    let size: Size = parts.next()?.parse().ok()?;
    let (mut iops, mut mbps, mut latency_us) = (None, None, None);
    for part in parts {
        let (name, number) = part.split_once('=')?;
        let place = match name {
            "iops" => &mut iops,
            "mbps" => &mut mbps,
            "latency-us" => &mut latency_us,
            _ => return None,
        };
        if place.replace(number.parse().ok()?).is_some() {
            return None;
        }
    }
    Some(DriveModel {
        bytes: size.0,
        iops: iops?,
        megabytes_per_second: mbps?,
        latency_us: latency_us.unwrap_or(0),
    })
}

/// The array whose label a drive carries. `None`: it is not known here, or it cannot be asked.
async fn array_of(drive: &Drive, client: &Client) -> Option<Array> {
    let uuid = drive.array_uuid?;
    let arrays: Vec<Array> = client.get("/v1/arrays").await.ok()?;
    arrays.into_iter().find(|its| its.uuid == uuid)
}

/// What becomes of a drive that is, or was, a member of the array called `name`, or can be done
/// with it.
fn hint(drive: DriveState, name: &str, array: Option<&Array>) -> String {
    let runs = |its: &Array| match its.state {
        ArrayState::Optimal | ArrayState::Degraded | ArrayState::Failed | ArrayState::Silent => {
            true
        }
        ArrayState::Stopped | ArrayState::Unavailable => false,
    };
    match (drive, array) {
        (DriveState::Replaced, _) => format!(
            "another drive has its place in array {name}: it is not used; to use it for something \
             else, say --force to `ashlar array create`, `ashlar array replace` or `ashlar spare \
             add`"
        ),
        (DriveState::Member, _) => format!("array {name} has taken it back"),
        (_, Some(its)) if runs(its) => format!(
            "array {name} runs, and takes the drive back by itself, or `ashlar status` says why not"
        ),
        (_, Some(its)) if its.on_demand => {
            format!("array {name} is on demand: it comes when a guest needs it here")
        }
        (_, _) => format!("`ashlar array start --scan` starts array {name}"),
    }
}

/// A line, and what the operator should know under it.
pub fn with_notes(line: &str, notes: &[String]) -> String {
    let notes = notes.iter().map(|note| format!("\nnote: {note}"));
    format!("{line}{}", notes.collect::<String>())
}

pub fn drives_table(drives: &[Drive]) -> String {
    let mut shown = table(&[
        "NAME",
        "STATE",
        "KIND",
        "SIZE>",
        "ARRAY",
        "MEMBER>",
        "HEALTH",
        "READ p99>",
        "WRITE p99>",
        "SOURCE",
    ]);
    for drive in drives {
        shown.add_row([
            drive.name.clone(),
            state(drive).to_owned(),
            or_dash(drive.kind.map(kind)),
            or_dash(drive.bytes.map(Size)),
            or_dash(drive.array.as_ref()),
            or_dash(drive.member),
            health(drive),
            or_dash(drive.latency.and_then(|its| p99(its.reads))),
            or_dash(drive.latency.and_then(|its| p99(its.writes))),
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
        DriveState::Spare => "spare",
        DriveState::Replaced => "replaced",
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

/// `healthy, slow`
fn health(drive: &Drive) -> String {
    let slow = if drive.slow == Some(true) { ", slow" } else { "" };
    format!("{}{slow}", or_dash(drive.health.map(health_name)))
}

fn kind(kind: DriveKind) -> &'static str {
    match kind {
        DriveKind::File => "file",
        DriveKind::BlockDevice => "block",
        DriveKind::Nvme => "nvme",
        DriveKind::Remote => "remote",
        DriveKind::Ram => "ram",
        DriveKind::Model => "model",
        DriveKind::Lossy => "lossy",
    }
}

fn p99(its: LatencySummary) -> Option<String> {
    (its.operations > 0).then(|| time(its.p99_ns))
}

fn latency(its: LatencySummary) -> String {
    if its.operations == 0 {
        return "none lately".to_owned();
    }
    let [p50, p99, p999] = [its.p50_ns, its.p99_ns, its.p999_ns].map(time);
    format!("p50 {p50}, p99 {p99}, p99.9 {p999} ({} lately)", its.operations)
}

/// `1200 reads/s (4.9 MB/s), 30 writes/s (0.1 MB/s), 2 flushes/s`
fn rates(its: &Traffic) -> String {
    let (reads, writes) = (&its.reads, &its.writes);
    let [read, written] = [reads, writes].map(|its| megabytes(its.bytes_per_second));
    format!(
        "{} reads/s ({read} MB/s), {} writes/s ({written} MB/s), {} flushes/s",
        reads.per_second, writes.per_second, its.flushes.per_second
    )
}

/// `io_uring, registered file, fixed buffers, no polling (Operation not supported), passthrough`
fn queue(its: &DriveQueue) -> String {
    let word = |what: &str, its: &Used| match &its.why_not {
        None => what.to_owned(),
        Some(why) => format!("no {what} ({why})"),
    };
    let words = [
        "io_uring".to_owned(),
        word("registered file", &its.registered_file),
        word("fixed buffers", &its.fixed_buffers),
        word("polling", &its.polling),
        word("passthrough", &its.passthrough),
    ];
    words.join(", ")
}

/// How a drive of another host is reached.
fn path(its: &RemotePath) -> Vec<String> {
    let state = match its.state {
        PathState::Idle => "idle",
        PathState::Connected => "connected",
        PathState::Connecting => "connecting",
        PathState::Lost => "lost",
        PathState::Another => "lost: another namespace is there now",
    };
    let digests = match (its.header_digest, its.data_digest) {
        (false, false) => "none",
        (true, false) => "headers",
        (false, true) => "data",
        (true, true) => "headers, data",
    };
    let proofs = match (its.has_secret, its.has_controller_secret) {
        (false, _) => "none",
        (true, false) => "of this host",
        (true, true) => "of this host and of the target",
    };
    let cache = match (its.volatile_cache, its.tells_power) {
        (true, true) => "volatile, and it tells when it was without power",
        (true, false) => "volatile",
        (false, _) => "none, or one that lasts",
    };
    let mut lines = vec![
        format!("transport {}", its.transport),
        format!("address   {}", its.address),
        format!("subsystem {}", its.subsystem),
        format!("nsid      {}", its.namespace),
        format!("host nqn  {}", its.host_nqn),
        format!("digests   {digests}"),
        format!("proofs    {proofs}"),
        format!("cache     {cache}"),
        format!("path      {state}, {} connected, {} reconnects", its.connected, its.reconnects),
    ];
    lines.extend(its.error.as_ref().map(|error| format!("path said {error}")));
    lines
}

/// Over all starts.
fn history(its: &DriveHistory) -> Vec<String> {
    let errors = or_dash(its.errors());
    let mut lines = vec![format!("errors    {errors}; the first {}", ago(its.since_s))];
    let failed = its.failed_s.zip(its.failure.as_ref());
    lines.extend(failed.map(|(at_s, why)| format!("failed    {}: {why}", ago(at_s))));
    lines
}

fn details(drive: &Drive) -> String {
    let mut lines = vec![
        format!("name      {}", drive.name),
        format!("source    {}", drive.source),
        format!("state     {}", state(drive)),
        format!("kind      {}", or_dash(drive.kind.map(kind))),
        format!("size      {}", or_dash(drive.bytes.map(Size))),
        format!("sector    {}", or_dash(drive.sector_bytes.map(|bytes| Size(bytes.into())))),
        format!("content   {}", or_dash(drive.content.as_ref())),
        format!("uuid      {}", or_dash(drive.uuid)),
        format!("array     {}", or_dash(drive.array.as_ref())),
        format!("member    {}", or_dash(drive.member)),
        format!("health    {}", health(drive)),
    ];
    if let Some(its) = &drive.counters {
        let (read, written) = (Size(its.read_bytes), Size(its.write_bytes));
        lines.push(format!("reads     {} ({read}), {} failed", its.reads, its.read_errors));
        lines.push(format!("writes    {} ({written}), {} failed", its.writes, its.write_errors));
        lines.push(format!("flushes   {}", its.flushes));
        lines.push(format!("retries   {}", its.retries));
        lines.push(format!("timeouts  {}", its.timeouts));
        let (blocks, checksums) = (its.wrong_blocks, its.wrong_checksums);
        lines.push(format!("wrong     {blocks} blocks, {checksums} checksums"));
        lines.push(format!("no room   for {} writes", its.no_space));
    }
    lines.extend(drive.history.iter().flat_map(history));
    if let Some(its) = &drive.queue {
        lines.push(format!("queue     {}", queue(its)));
        lines.push(format!("depth     {} now, {} at most", its.depth, its.depth_max));
    }
    if let Some(its) = &drive.latency {
        lines.push(format!("read      {}", latency(its.reads)));
        lines.push(format!("write     {}", latency(its.writes)));
        lines.extend(drive.slowness.iter().map(|its| format!("slow      {its}")));
    }
    if let Some(its) = &drive.traffic {
        lines.push(format!("lately    {}", rates(its)));
    }
    if let Some(its) = &drive.path {
        lines.extend(path(its));
    }
    lines.extend(drive.error.as_ref().map(|error| format!("error     {error}")));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_that_people_write() {
        let whole = "1G,iops=500000,mbps=6000,latency-us=80";
        let found = model(whole).unwrap();
        assert_eq!((found.bytes, found.megabytes_per_second), (1 << 30, 6000));
        assert_eq!(found.to_string(), whole);
        assert_eq!(model("1G,mbps=6000,iops=500000").unwrap().latency_us, 0);
        for wrong in
            ["", "1G", "1G,iops=1", "1G,iops=1,mbps=x", "1G,iops=1,mbps=1,", "1G,iops=1,iops=1"]
        {
            assert_eq!(model(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn queues_say_what_they_lack() {
        let (yes, no) = (
            Used { used: true, why_not: None },
            Used { used: false, why_not: Some("switched off".into()) },
        );
        let its = DriveQueue {
            registered_file: yes.clone(),
            fixed_buffers: yes,
            polling: no.clone(),
            passthrough: no,
            depth: 0,
            depth_max: 7,
        };
        let said = "io_uring, registered file, fixed buffers, no polling (switched off), no \
                    passthrough (switched off)";
        assert_eq!(queue(&its), said);
    }
}

//! `ashlar export …`

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;

use crate::access::{SocketAccess, SocketMode};
use crate::api::Done;
use crate::api::export::{
    Export, ExportCreate, ExportKind, ExportLimits, ExportPart, ExportState, HostsChange,
    LimitsChange,
};
use crate::cli::complete;
use crate::cli::drive::{read_secret, with_notes};
use crate::cli::output::{Output, listed, or_dash, rows, say, show, table};
use crate::cli::traffic;
use crate::client::{Client, path_of};
use crate::daemon::CpuList;
use crate::period::Period;
use crate::refusal::{Answer, Refusal};
use crate::secret::Secret;
use crate::size::Size;

#[derive(Subcommand)]
pub enum Command {
    /// Offer a volume to a guest, to hosts on the network, or to this host
    Create(Box<Create>),
    /// Withdraw an export
    Delete {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::exports))]
        name: String,
        /// Also if it is in use: whoever uses it loses its disk
        #[arg(long)]
        force: bool,
    },
    /// All exports
    List,
    /// Limit how fast it may go, say who may connect to its socket, which hosts may use it and what
    /// they have to prove;
    /// without options: show the limits
    Set(Box<Set>),
    /// One export
    Show {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::exports))]
        name: String,
        /// Only the options that give it to a QEMU guest; --socket-user lets QEMU's user connect
        #[arg(long, conflicts_with = "libvirt")]
        qemu: bool,
        /// Only the XML that gives it to a libvirt guest; --socket-user lets libvirt's QEMU connect
        #[arg(long)]
        libvirt: bool,
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
    /// The socket; left out: export/NAME.sock beside the daemon's socket. fuse: the file, which
    /// is not there yet, or empty
    #[arg(long, value_hint = clap::ValueHint::FilePath)]
    path: Option<PathBuf>,
    /// nvme-tcp, nbd: the address of this host where others connect, such as 192.0.2.1:4420; of nbd
    /// instead of the socket unless --path is there too, and whoever can connect can read and write
    #[arg(long, value_name = "ADDRESS:PORT", value_hint = clap::ValueHint::Hostname)]
    listen: Option<SocketAddr>,
    /// nvme-tcp: name of the subsystem; exports of one name and address are its namespaces; left
    /// out: one made of the volume's uuid
    #[arg(long, add = ArgValueCandidates::new(complete::subsystems))]
    nqn: Option<String>,
    /// nvme-tcp: number of the namespace; left out: the first that is free
    #[arg(long)]
    nsid: Option<u32>,
    /// nvme-tcp: a host that may use it (its /etc/nvme/hostnqn); several times for several; left
    /// out, and no --host-secret: whoever can connect can read and write
    #[arg(long = "host", value_name = "NQN")]
    hosts: Vec<String>,
    /// nvme-tcp: a host that may use it, and has to prove who it is (DH-HMAC-CHAP): its secret is
    /// in the file, as `ashlar gen-secret` makes it; several times for several
    #[arg(long = "host-secret", value_name = "NQN=FILE", value_parser = secret_of_host)]
    host_secrets: Vec<SecretOfHost>,
    /// nvme-tcp: the subsystem's own secret, for hosts that want a proof of it
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    controller_secret: Option<PathBuf>,
    /// ublk: number of the block device, /dev/ublkbN; left out: the first that is free
    #[arg(long, value_name = "N")]
    id: Option<u32>,
    /// ublk: bytes of a block, 512 or 4096; left out: 512
    #[arg(long, value_name = "SIZE")]
    block: Option<Size>,
    /// Most queues of it that may be used
    #[arg(long)]
    queues: Option<u16>,
    /// CPUs of reactors that serve its queues in turn, such as 2,4-5; left out: those that share
    /// a cache with the array's reactor, or its node
    #[arg(long, value_name = "LIST")]
    cores: Option<CpuList>,
    #[command(flatten)]
    access: Access,
    #[command(flatten)]
    limits: Limits,
}

#[derive(Args)]
pub struct Set {
    /// Its name
    #[arg(add = ArgValueCandidates::new(complete::exports))]
    name: String,
    #[command(flatten)]
    limits: Limits,
    #[command(flatten)]
    access: Access,
    #[command(flatten)]
    hosts: Hosts,
}

/// Who may connect to the socket. Of `export set`: what is left out stays as it is.
#[derive(Args)]
pub struct Access {
    /// vhost-user-blk, nbd: whose the socket is, such as libvirt-qemu, or a number; it is given to
    /// that user whenever it is made; usual: the daemon's own
    #[arg(long, value_name = "USER", value_hint = clap::ValueHint::Username)]
    socket_user: Option<String>,
    /// vhost-user-blk, nbd: the group of the socket
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// vhost-user-blk, nbd: the socket's mode; who may write may connect; usual: 0600, and with a
    /// group 0660
    #[arg(long, value_name = "MODE")]
    socket_mode: Option<SocketMode>,
}

impl Access {
    fn change(self) -> SocketAccess {
        let Access { socket_user: user, socket_group: group, socket_mode: mode } = self;
        SocketAccess { user, group, mode }
    }
}

/// Which hosts may use it, and what they have to prove when they connect from now on, in all
/// exports of the subsystem. Who is connected stays so, but for hosts that may not any more, and
/// those that never proved anything and have to now.
#[derive(Args)]
pub struct Hosts {
    /// nvme-tcp: one more host that may use it, at once; several times for several. If any host
    /// might before, only these may now
    #[arg(long = "host", value_name = "NQN")]
    allow: Vec<String>,
    /// nvme-tcp: a host that may not use it any more: it loses its disk at once
    #[arg(long = "no-host", value_name = "NQN")]
    forbid: Vec<String>,
    /// nvme-tcp: the secret of a host that may use it is now the one in the file
    #[arg(long = "host-secret", value_name = "NQN=FILE", value_parser = secret_of_host)]
    host_secrets: Vec<SecretOfHost>,
    /// nvme-tcp: a host that may use it does not have to prove who it is any more
    #[arg(long = "no-host-secret", value_name = "NQN")]
    no_host_secrets: Vec<String>,
    /// nvme-tcp: the subsystem's own secret is now the one in the file
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    controller_secret: Option<PathBuf>,
    /// nvme-tcp: the subsystem has none any more
    #[arg(long, conflicts_with = "controller_secret")]
    no_controller_secret: bool,
    /// nvme-tcp: name hosts by --host also where any host might use it before, and some do
    #[arg(long)]
    force: bool,
}

/// A host, and the file with its secret.
#[derive(Clone)]
struct SecretOfHost {
    nqn: String,
    file: PathBuf,
}

fn secret_of_host(text: &str) -> Result<SecretOfHost, String> {
    let parts = text.split_once('=').filter(|(nqn, file)| !nqn.is_empty() && !file.is_empty());
    let (nqn, file) = parts.ok_or("write NQN=FILE")?;
    Ok(SecretOfHost { nqn: nqn.to_owned(), file: file.into() })
}

fn read_secrets(of: Vec<SecretOfHost>) -> Answer<BTreeMap<String, Secret>> {
    let mut secrets = BTreeMap::new();
    for SecretOfHost { nqn, file } in of {
        if secrets.contains_key(&nqn) {
            return Err(Refusal::invalid(format!("{nqn} is given two secrets"))
                .fix("name it in one --host-secret"));
        }
        let secret = read_secret(Some(&file))?;
        secrets.extend(secret.map(|secret| (nqn, secret)));
    }
    Ok(secrets)
}

impl Hosts {
    fn change(self) -> Answer<HostsChange> {
        let new = read_secrets(self.host_secrets)?;
        if let Some(nqn) = self.no_host_secrets.iter().find(|its| new.contains_key(*its)) {
            return Err(Refusal::invalid(format!("{nqn} is given a secret, and is to have none"))
                .fix("leave out its --host-secret, or its --no-host-secret"));
        }
        let gone = self.no_host_secrets.into_iter().map(|nqn| (nqn, None));
        let new = new.into_iter().map(|(nqn, secret)| (nqn, Some(secret)));
        Ok(HostsChange {
            allow: self.allow,
            forbid: self.forbid,
            secrets: gone.chain(new).collect(),
            controller: read_secret(self.controller_secret.as_deref())?,
            remove_controller: self.no_controller_secret,
            force: self.force,
        })
    }
}

#[derive(Args, Clone, Copy)]
pub struct Limits {
    /// Reads a second, or none for no limit
    #[arg(long, value_name = "NUMBER", value_parser = iops)]
    read_iops: Option<u64>,
    /// Writes, discards and write-zeroes a second, or none
    #[arg(long, value_name = "NUMBER", value_parser = iops)]
    write_iops: Option<u64>,
    /// Bytes read a second, such as 200M, or none
    #[arg(long, value_name = "SIZE", value_parser = bandwidth)]
    read_bandwidth: Option<u64>,
    /// Bytes written a second, or none
    #[arg(long, value_name = "SIZE", value_parser = bandwidth)]
    write_bandwidth: Option<u64>,
    /// For how long unused allowance is saved up, up to 1h; usual: 1s
    #[arg(long, value_name = "TIME")]
    burst: Option<Period>,
}

fn iops(text: &str) -> Result<u64, String> {
    limit(text, |text| text.parse().map_err(|_| format!("{text:?} is no number")))
}

fn bandwidth(text: &str) -> Result<u64, String> {
    limit(text, |text| text.parse::<Size>().map(|it| it.0).map_err(|error| error.to_string()))
}

/// Nobody means a limit of zero; that stands for none.
fn limit(text: &str, parse: impl Fn(&str) -> Result<u64, String>) -> Result<u64, String> {
    if text == "none" {
        return Ok(0);
    }
    let limit = parse(text).map_err(|error| format!("{error}, or none"))?;
    Some(limit).filter(|it| *it > 0).ok_or_else(|| "write none for no limit".to_owned())
}

impl Limits {
    fn change(self) -> LimitsChange {
        LimitsChange {
            read_iops: self.read_iops,
            write_iops: self.write_iops,
            read_bytes_per_second: self.read_bandwidth,
            write_bytes_per_second: self.write_bandwidth,
            burst_s: self.burst.map(|period| period.0),
        }
    }
}

pub async fn run(command: Command, client: &Client, output: Output) -> Answer<()> {
    match command {
        Command::Create(create) => {
            let export: Export = client.post("/v1/exports", &create.request()?).await?;
            show(output, &export, |export| {
                let qemu = export.qemu.as_ref();
                let qemu =
                    qemu.map(|its| format!("\nfor QEMU (size= is the guest's memory):\n  {its}"));
                let nvme = export.nvme.as_ref();
                let nvme = nvme.map(|its| format!("\non a Linux host:\n  {}", its.connect));
                format!("{}{}{}", export.place, qemu.unwrap_or_default(), nvme.unwrap_or_default())
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
        Command::Set(change) => set(*change, client, output).await,
        Command::Show { name, qemu, libvirt } => {
            let export: Export = client.get(&path_of("exports", &name)).await?;
            if qemu || libvirt {
                let only = if qemu { export.qemu } else { export.libvirt };
                let none = || {
                    let text = format!(
                        "{name} is an export by {}, not for a virtual machine",
                        export.kind.name()
                    );
                    Refusal::invalid(text).fix("those by vhost-user-blk and by nbd are")
                };
                return say(&only.ok_or_else(none)?);
            }
            show(output, &export, details)
        }
    }
}

/// The last that was set is shown.
async fn set(change: Set, client: &Client, output: Output) -> Answer<()> {
    let (limits, access) = (change.limits.change(), change.access.change());
    let hosts = change.hosts.change()?;
    let path = path_of("exports", &change.name);
    let sets_limits = limits != LimitsChange::default();
    if !hosts.is_empty() {
        let export: Export = client.post(&format!("{path}/hosts"), &hosts).await?;
        if access.is_usual() && !sets_limits {
            return show(output, &export, |export| hosts_shown(export).join("\n"));
        }
    }
    if !access.is_usual() {
        let export: Export = client.post(&format!("{path}/access"), &access).await?;
        if !sets_limits {
            let shown = |export: &Export| or_dash(export.socket_access.as_ref());
            return show(output, &export, shown);
        }
    }
    let export: Export = client.post(&format!("{path}/set"), &limits).await?;
    show(output, &export, |export| limits_shown(&export.limits))
}

impl Create {
    fn request(self) -> Answer<ExportCreate> {
        let path = match self.path {
            Some(path) => Some(std::path::absolute(&path).map_err(|error| {
                Refusal::invalid(format!("{} is no path: {error}", path.display()))
            })?),
            None => None,
        };
        let (socket, file) = match self.kind {
            ExportKind::VhostUserBlk | ExportKind::NvmeTcp | ExportKind::Nbd | ExportKind::Ublk => {
                (path, None)
            }
            ExportKind::Fuse => (None, path),
        };
        let host_secrets = read_secrets(self.host_secrets)?;
        let controller_secret = read_secret(self.controller_secret.as_deref())?;
        let block_bytes = self.block.map(|Size(bytes)| u32::try_from(bytes).unwrap_or(u32::MAX));
        let Create { name, volume, kind, listen, nqn, nsid, hosts, id: device, queues, .. } = self;
        let socket_access = self.access.change();
        let (cores, limits) = (self.cores.map(|CpuList(cpus)| cpus), self.limits.change());
        Ok(ExportCreate {
            name,
            volume,
            kind,
            socket,
            socket_access,
            file,
            listen,
            nqn,
            nsid,
            hosts,
            host_secrets,
            controller_secret,
            device,
            block_bytes,
            queues,
            cores,
            limits,
        })
    }
}

pub fn exports_table(exports: &[Export]) -> String {
    let mut shown = table(&["NAME", "STATE", "VOLUME", "QUEUES>", "READ>", "WRITTEN>", "PLACE"]);
    for export in exports {
        shown.add_row([
            export.name.clone(),
            export.state.name().to_owned(),
            export.volume.clone(),
            queues(export, "/"),
            Size(export.counters.read_bytes).to_string(),
            Size(export.counters.write_bytes).to_string(),
            export.place.clone(),
        ]);
    }
    rows(&shown, "no exports; `ashlar export create NAME --volume VOLUME` makes one")
}

/// Those in use, and how many there may be.
fn queues(export: &Export, of: &str) -> String {
    let most = export.queues.map(|most| format!("{of}{most}"));
    format!("{}{}", export.queues_active, most.unwrap_or_default())
}

/// `reads 1000/s, writes 500/s and 20M/s, burst 1s`
fn limits_shown(limits: &ExportLimits) -> String {
    let rate = |what: &str, iops: Option<u64>, bandwidth: Option<u64>| {
        let iops = iops.map(|iops| format!("{iops}/s"));
        let rates: Vec<String> =
            iops.into_iter().chain(bandwidth.map(|bytes| format!("{}/s", Size(bytes)))).collect();
        (!rates.is_empty()).then(|| format!("{what} {}", rates.join(" and ")))
    };
    let reads = rate("reads", limits.read_iops, limits.read_bytes_per_second);
    let writes = rate("writes", limits.write_iops, limits.write_bytes_per_second);
    let rates: Vec<String> = reads.into_iter().chain(writes).collect();
    match rates.is_empty() {
        true => "none".to_owned(),
        false => format!("{}, burst {}", rates.join(", "), Period(limits.burst_s)),
    }
}

/// Which hosts may use it, and of whom there are secrets.
fn hosts_shown(export: &Export) -> Vec<String> {
    let Some(its) = &export.nvme else { return Vec::new() };
    let any = || "any that can connect".to_owned();
    let hosts = if its.hosts.is_empty() { any() } else { its.hosts.join(" ") };
    let secrets = its.hosts_with_secret.iter().map(|host| format!("of {host}"));
    let secrets = secrets.chain(its.controller_secret.then(|| "of the subsystem".to_owned()));
    let secrets = listed(&secrets.collect::<Vec<_>>());
    vec![format!("hosts     {hosts}"), format!("secrets   {secrets}")]
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
        format!("state     {}", export.state.name()),
        format!("volume    {}/{}", export.array, export.volume),
        format!("kind      {}", export.kind.name()),
        format!("place     {}", export.place),
        format!("way       {}", or_dash(export.way.as_ref())),
        format!("serial    {}", or_dash(export.serial.as_ref())),
        format!("queues    {}", queues(export, " in use of ")),
        format!("cores     {}", parts(export)),
        format!("reads     {} ({})", its.reads, Size(its.read_bytes)),
        format!("writes    {} ({})", its.writes, Size(its.write_bytes)),
        format!("flushes   {}", its.flushes),
        format!("discards  {}", its.discards),
        format!("errors    {}", its.errors),
        format!("limits    {}", limits_shown(&export.limits)),
    ];
    if its.limited > 0 {
        lines.push(format!("limited   {} had to wait", its.limited));
    }
    lines.extend(export.traffic.iter().flat_map(|its| traffic::lines(its, 10)));
    lines.extend(export.socket_access.as_ref().map(|its| format!("socket    {its}")));
    lines.extend(export.error.as_ref().map(|error| format!("error     {error}")));
    let unreachable = export.unreachable.as_ref().filter(|_| export.state != ExportState::Down);
    lines.extend(unreachable.map(|why| format!("lost      {why}")));
    if let Some(its) = &export.nvme {
        lines.push(format!("subsystem {}", its.nqn));
        lines.push(format!("namespace {}", its.nsid));
        lines.extend(hosts_shown(export));
        lines.push(format!("connect   {}", its.connect));
    }
    lines.extend(export.qemu.as_ref().map(|qemu| format!("qemu      {qemu}")));
    lines.join("\n")
}

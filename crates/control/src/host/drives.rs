//! Attaching, detaching and probing drives.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ashlar_reactor::join::join_all;
use ashlar_reactor::op::Device;
use tokio::task::JoinError;
use tokio::time::Instant;

use crate::api::Done;
use crate::api::drive::{Drive, DriveAttach, DriveModel, DriveSource};
use crate::catalog::KnownDrive;
use crate::device::content::Content;
use crate::device::{self, Identity, LET_GO_TIMEOUT, OpenDevice};
use crate::engine::{self, Memory};
use crate::host::{Attached, Host, Medium, cut};
use crate::name::{check_name, name_from_path};
use crate::pci::PciAddress;
use crate::refusal::{Answer, Refusal, RefusalKind};
use crate::remote::{Credentials, Initiator, RemoteAddress};
use crate::size::Size;

/// How long a drive may take to answer; one that does not must not hold up everything.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// More would be no model of any drive, and less no drive.
const MODEL_IOPS: RangeInclusive<u64> = 1..=100_000_000;
const MODEL_MEGABYTES_PER_SECOND: RangeInclusive<u64> = 1..=1_000_000;
const MODEL_LATENCY_US_MAX: u64 = 1_000_000;

/// Where a drive is that has a life of its own.
#[derive(Clone)]
enum Place {
    Path(PathBuf),
    Pci(PciAddress),
    Remote(RemoteAddress, Credentials),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Path(path) => path.display().fmt(f),
            Place::Pci(address) => write!(f, "pci:{address}"),
            Place::Remote(address, _) => address.fmt(f),
        }
    }
}

/// What to open, and how; sent to a thread that may wait for the disk.
struct Opening {
    place: Place,
    lossy: bool,
    /// Who asks for one of another host.
    initiator: Initiator,
    size_bytes: Option<u64>,
    /// Drives that are attached already.
    known: Vec<(String, Identity)>,
    /// With one that another process has.
    patience: Duration,
}

/// A drive that was opened, and what to undo if it is not attached after all.
struct Opened {
    device: OpenDevice,
    content: Content,
    /// Refused if `content` may be someone's data.
    harmless: Answer<()>,
    created: Option<PathBuf>,
}

impl Opened {
    /// Whether it is shorter than its label says.
    fn is_cut(&self) -> bool {
        let bytes = self.device.limits.bytes;
        self.content.label().is_some_and(|label| label.drive_bytes > bytes)
    }
}

/// What the catalog has of a drive, as it was found.
pub(super) struct Reopened {
    attached: Attached,
    harmless: Answer<()>,
    is_cut: bool,
}

impl Host {
    pub async fn attach_drive(&self, request: DriveAttach) -> Answer<Drive> {
        let _change = self.begin().await?;
        let name = self.new_drive_name(&request)?;
        let credentials = credentials(&request)?;
        let (attached, created) = match &request.source {
            DriveSource::Ram(bytes) => {
                (memory_drive(Memory::Ram { bytes: *bytes }, &request)?, None)
            }
            DriveSource::Model(model) => {
                check_model(model)?;
                (memory_drive(Memory::Model(*model), &request)?, None)
            }
            DriveSource::Path(path) | DriveSource::Lossy(path) => {
                if !path.is_absolute() {
                    let text = format!("{} is not an absolute path", path.display());
                    return Err(Refusal::invalid(text).fix("begin it with /"));
                }
                self.open_place(&name, Place::Path(path.clone()), &request).await?
            }
            DriveSource::Pci(address) => {
                if request.size_bytes.is_some() {
                    return Err(Refusal::invalid("a drive in a slot has the size that it has")
                        .fix("leave --size out"));
                }
                self.open_place(&name, Place::Pci(*address), &request).await?
            }
            DriveSource::NvmeTcp(address) => {
                if request.size_bytes.is_some() {
                    return Err(Refusal::invalid(
                        "a drive of another host has the size that it has",
                    )
                    .fix("leave --size out"));
                }
                let place = Place::Remote(address.clone(), credentials.clone());
                self.open_place(&name, place, &request).await?
            }
        };
        let known = KnownDrive { source: request.source, credentials };
        let recorded = self.record(|catalog| {
            catalog.drives.insert(name.clone(), known);
        });
        if let Err(refusal) = recorded {
            if let Some(path) = created {
                // Best effort: the refusal is what to tell.
                let _ = std::fs::remove_file(path);
            }
            return Err(refusal);
        }
        self.look(|state| state.attach(&name, attached));
        tracing::info!(drive = name, "drive attached");
        self.show_drive(&name).await
    }

    fn new_drive_name(&self, request: &DriveAttach) -> Answer<String> {
        let name = match (&request.name, &request.source) {
            (Some(name), _) => name.clone(),
            (None, DriveSource::Path(path) | DriveSource::Lossy(path)) => name_from_path(path)
                .ok_or_else(|| {
                    Refusal::invalid("no name can be made from the path").fix("give --name")
                })?,
            (None, DriveSource::Pci(address)) => format!("nvme-{address}").replace(':', "-"),
            (None, DriveSource::NvmeTcp(address)) => {
                address.name().unwrap_or_else(|| self.numbered_name("remote"))
            }
            (None, DriveSource::Ram(_)) => self.numbered_name("ram"),
            (None, DriveSource::Model(_)) => self.numbered_name("model"),
        };
        check_name("a drive", &name)?;
        // A missing drive may be attached anew, perhaps from another path.
        let namesake = self.look(|state| {
            let attached = state.drives.contains_key(&name);
            state.catalog.drives.get(&name).filter(|_| attached).map(|known| known.source.clone())
        });
        match namesake {
            None => {}
            Some(source) if source == request.source => {
                return Err(Refusal::conflict(format!("{source} is attached already, as {name}")));
            }
            Some(source) => {
                return Err(Refusal::conflict(format!(
                    "there is a drive {name} already: {source}"
                ))
                .fix("give another --name, or detach that one first"));
            }
        }
        Ok(name)
    }

    /// The first of `ram0`, `ram1`, … that is free.
    fn numbered_name(&self, kind: &str) -> String {
        self.look(|state| {
            let mut names = (0..).map(|number: u32| format!("{kind}{number}"));
            names.find(|name| !state.catalog.drives.contains_key(name)).expect("endless")
        })
    }

    /// Opens what is at `place`, and makes it blank if it carries what may be lost; the file that
    /// was made for it.
    async fn open_place(
        &self,
        name: &str,
        place: Place,
        request: &DriveAttach,
    ) -> Answer<(Attached, Option<PathBuf>)> {
        let opening = Opening {
            place,
            lossy: matches!(request.source, DriveSource::Lossy(_)),
            initiator: self.initiator,
            size_bytes: request.size_bytes,
            known: self.identities(),
            patience: LET_GO_TIMEOUT,
        };
        let shown = opening.place.to_string();
        let opened = blocking(name, move || open(opening)).await??;
        // Half a copy says nothing of the original.
        self.check_copy(&opened.content)?;
        if opened.is_cut() {
            self.note_cut(&opened.content)?;
        }
        let Opened { device, mut content, harmless, created } = opened;
        if request.whole && harmless.is_ok() {
            self.forget_cut(&content)?;
        }
        let device = Arc::new(device);
        if let Err(refusal) = harmless.and_then(|()| self.check_cut(&shown, &content)) {
            if !request.force {
                return Err(refusal);
            }
            device::check_size(&shown, device.limits.bytes)?;
            tracing::warn!(drive = name, "carried {content}: wiped, by force");
            wipe(name, &device).await?;
            self.forget_cut(&content)?;
            content = Content::Blank;
        }
        Ok((Attached::new(Medium::Device(device), content), created))
    }

    fn identities(&self) -> Vec<(String, Identity)> {
        self.look(|state| {
            let known = state.drives.iter().filter_map(|(name, drive)| match &drive.medium {
                Medium::Device(device) => Some((name.clone(), device.identity)),
                Medium::Memory { .. } => None,
            });
            known.collect()
        })
    }

    /// Refuses a byte-for-byte copy of a drive that is attached: two drives would be one member.
    pub(super) fn check_copy(&self, content: &Content) -> Answer<()> {
        let Content::Labelled(label) = content else { return Ok(()) };
        let twin = self.look(|state| {
            let twin = state.drives.iter().find(|(_, drive)| {
                matches!(&drive.content, Content::Labelled(known) if known.drive == label.drive)
            });
            twin.map(|(name, _)| name.clone())
        });
        match twin {
            None => Ok(()),
            Some(twin) => Err(Refusal::conflict(format!(
                "it is a copy of drive {twin}: both carry the label of drive {}",
                label.drive
            ))
            .fix(format!("detach {twin}, or attach only the original"))),
        }
    }

    /// Attaches the drives of the catalog again, at start; those that cannot be are missing. All
    /// are opened at once: a shelf of drives that do not answer takes no longer than one of them.
    pub(super) async fn reattach_drives(&self, drives: BTreeMap<String, KnownDrive>) {
        let initiator = self.initiator;
        let begin = |(name, known): (String, KnownDrive)| {
            let opening = tokio::spawn(reopen(name.clone(), known, initiator, LET_GO_TIMEOUT));
            (name, opening)
        };
        let opening: Vec<_> = drives.into_iter().map(begin).collect();
        for (name, opening) in opening {
            let opened = opening.await.unwrap_or_else(|error| Err(internal(&error)));
            match opened.and_then(|drive| self.admit(&name, drive)) {
                Ok(drive) => self.look(|state| state.attach(&name, drive)),
                Err(refusal) => {
                    tracing::error!(drive = name, "drive not attached: {}", refusal.line());
                    self.look(|state| state.missing.insert(name, refusal));
                }
            }
        }
    }

    /// Whether a drive of the catalog is one that can be used.
    pub(super) fn admit(&self, name: &str, drive: Reopened) -> Answer<Attached> {
        let Reopened { attached, harmless, is_cut } = drive;
        self.check_copy(&attached.content)?;
        if is_cut {
            self.note_cut(&attached.content)?;
        }
        harmless?;
        self.check_cut(&format!("drive {name}"), &attached.content)?;
        Ok(attached)
    }

    pub async fn detach_drive(&self, name: &str, force: bool) -> Answer<Done> {
        // A change that is under way may be waiting for what this drive does not answer, and so may
        // guests: neither its turn is waited for, nor that anything can be stored.
        let was_pulled = force && self.pull_drive(name).await?;
        let _change = self.begin().await.map_err(|refusal| match was_pulled {
            true => {
                let text = format!("drive {name} was pulled, and not detached: {}", refusal.error);
                Refusal { error: text, ..refusal }
            }
            false => refusal,
        })?;
        if self.look(|state| state.missing.contains_key(name)) {
            return self.forget_drive(name).await;
        }
        let mut notes = Vec::new();
        let attached = self.attached(name)?;
        if let Some((array, member)) = attached.used_by {
            let array_name = self.array_name(array);
            if !force {
                return Err(Refusal::conflict(format!(
                    "drive {name} is member {member} of the running array {array_name}"
                ))
                .fix(format!(
                    "stop the array, replace the drive, or pull it by `ashlar drive detach \
                     {name} --force`"
                )));
            }
            self.pull(array, member).await?;
            if let Some(drive) = attached.device().and_then(|device| device.remote()) {
                drive.let_go();
            }
            tracing::warn!(drive = name, array = array_name, member, "drive pulled");
            // Now, not when the watch comes by: a host that dies next must not trust this drive.
            self.after_members_changed(array).await?;
            notes.push(format!("member {member} of array {array_name} has lost its drive"));
        }
        if let Medium::Device(device) = &attached.medium
            && !let_go(device).await
        {
            notes.push("it can be attached again once it has answered what it was asked".into());
        }
        drop(attached);
        let mut done = self.forget_drive(name).await?;
        notes.append(&mut done.notes);
        Ok(Done { notes })
    }

    async fn forget_drive(&self, name: &str) -> Answer<Done> {
        let spare = self.look(|state| state.catalog.spares.get(name).cloned());
        self.record(|catalog| {
            catalog.drives.remove(name);
            catalog.spares.remove(name);
        })?;
        let attached = self.look(|state| {
            state.missing.remove(name);
            state.drives.remove(name)
        });
        match attached.map(|attached| attached.medium) {
            Some(Medium::Memory { home: Some(home), .. }) => {
                engine::forget(self.core(home.core), home.key).await?;
            }
            // Letting an NVMe drive go takes a while; too long is no reason to keep it.
            Some(Medium::Device(device)) => drop(blocking(name, move || drop(device)).await),
            Some(Medium::Memory { home: None, .. }) | None => {}
        }
        tracing::info!(drive = name, "drive detached");
        let was_spare = spare.map(|its| match its.array {
            Some(array) => format!("it is no spare of array {} any more", self.array_name(array)),
            None => "it is no spare any more".to_owned(),
        });
        Ok(Done { notes: was_spare.into_iter().collect() })
    }

    /// Looks at a drive anew: what it carries has changed, or is about to be decided on.
    pub(super) async fn probe_drive(&self, name: &str) -> Answer<Content> {
        let drive = self.attached(name)?;
        let Medium::Device(device) = drive.medium else { return Ok(drive.content) };
        let shown = name.to_owned();
        let probed = blocking(name, move || {
            device.content().map_err(|error| {
                Refusal::failed(format!("drive {shown} cannot be read: {error}"))
                    .fix(format!("see `ashlar drive show {shown}`, or replace it"))
            })
        });
        let content = probed.await??;
        self.look(|state| state.note_content(name, content.clone()));
        Ok(content)
    }

    /// Looks anew at the drives that are not in use here: another host that reaches them may have
    /// made an array of them, or have given one other drives.
    pub(super) async fn probe_free_drives(&self) {
        let free: Vec<String> = self.look(|state| {
            let drives = state.drives.iter().filter(|(_, its)| its.used_by.is_none());
            drives.map(|(name, _)| name.clone()).collect()
        });
        // One that cannot be read keeps what was known of it; a start will say so.
        join_all(free.iter().map(|drive| self.probe_drive(drive))).await;
    }
}

/// Asks the disk of a drive where nobody else waits for it, and not for ever. What it answers too
/// late is dropped.
pub(super) async fn blocking<T: Send + 'static>(
    drive: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Answer<T> {
    blocking_for(ANSWER_TIMEOUT, drive, work).await
}

async fn blocking_for<T: Send + 'static>(
    limit: Duration,
    drive: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Answer<T> {
    match tokio::time::timeout(limit, tokio::task::spawn_blocking(work)).await {
        Ok(done) => done.map_err(|error| internal(&error)),
        Err(_) => Err(Refusal::failed(format!("drive {drive} does not answer"))
            .fix("see the kernel's log (`dmesg`), or use another drive")),
    }
}

fn internal(error: &JoinError) -> Refusal {
    Refusal::failed(format!("an internal error: {error}"))
}

/// Of a drive that is not there when the daemon starts.
const COMES: &str = "bring it back: in the first quarter of an hour after the start it is attached \
                     once it is there, later by `ashlar drive detach` and `attach`";

/// What the catalog has of a drive, as a drive. `patience`: with one that another process has. One
/// that is not there may come: its driver may not have found it yet.
pub(super) async fn reopen(
    name: String,
    known: KnownDrive,
    initiator: Initiator,
    patience: Duration,
) -> Answer<Reopened> {
    let blank =
        |memory| Ok(Reopened { attached: blank_memory(memory), harmless: Ok(()), is_cut: false });
    let (place, lossy) = match known.source {
        DriveSource::Ram(bytes) => return blank(Memory::Ram { bytes }),
        DriveSource::Model(model) => return blank(Memory::Model(model)),
        DriveSource::Path(path) => (Place::Path(path), false),
        DriveSource::Lossy(path) => (Place::Path(path), true),
        DriveSource::Pci(address) => (Place::Pci(address), false),
        DriveSource::NvmeTcp(address) => (Place::Remote(address, known.credentials), false),
    };
    // Others are being opened, too: two paths to one drive are told by its lock.
    let opening =
        Opening { place, lossy, initiator, size_bytes: None, known: Vec::new(), patience };
    let opened = blocking(&name, move || open(opening)).await?.map_err(|refusal| {
        if refusal.kind == RefusalKind::Unknown {
            return Refusal { may_pass: true, ..refusal.fix(COMES) };
        }
        refusal
    })?;
    let is_cut = opened.is_cut();
    let attached = Attached::new(Medium::Device(Arc::new(opened.device)), opened.content);
    Ok(Reopened { attached, harmless: opened.harmless, is_cut })
}

/// Makes a drive blank.
pub(super) async fn wipe(name: &str, device: &Arc<OpenDevice>) -> Answer<()> {
    // Lent until it is done: a wipe that answers too late must not hit what is written next.
    let held = lend(name, device).await?;
    let device = device.clone();
    let wiped = blocking(name, move || {
        let wiped = device.wipe();
        drop(held);
        wiped
    });
    wiped.await?.map_err(|error| {
        let text = format!("drive {name} could not be wiped: {error}");
        Refusal::failed(format!("{text}; it may still carry what it carried"))
    })
}

/// A device for a reactor, once nothing is under way on it any more.
pub(super) async fn lend(name: &str, device: &OpenDevice) -> Answer<Device> {
    if let_go(device).await {
        return Ok(device.lend());
    }
    Err(Refusal::conflict(format!("drive {name} has not answered what it was asked before")).fix(
        "try again when it has, or when Linux has given it up (see `dmesg`); or detach it, to go \
         on without it",
    ))
}

/// Waits until no reactor has the device; false if that takes too long.
async fn let_go(device: &OpenDevice) -> bool {
    let deadline = Instant::now() + LET_GO_TIMEOUT;
    while device.is_lent() {
        if Instant::now() >= deadline {
            return false;
        }
        tokio::time::sleep(LET_GO_TIMEOUT / 200).await;
    }
    true
}

fn open(opening: Opening) -> Answer<Opened> {
    let created = create_if_missing(&opening)?;
    let opened = device::when_free(opening.patience, || open_existing(&opening));
    match opened {
        Ok((device, content)) => {
            let bytes = device.limits.bytes;
            let harmless = check_content(&opening.place, bytes, &content)
                .and_then(|()| device::check_size(&opening.place.to_string(), bytes));
            Ok(Opened { device, content, harmless, created })
        }
        Err(refusal) => {
            if let Some(path) = created {
                // Best effort: the refusal is what to tell.
                let _ = std::fs::remove_file(path);
            }
            Err(refusal)
        }
    }
}

fn create_if_missing(opening: &Opening) -> Answer<Option<PathBuf>> {
    let (Some(bytes), Place::Path(path)) = (opening.size_bytes, &opening.place) else {
        return Ok(None);
    };
    // A dangling link is there, too: a file would be made where nobody looks for it.
    if path.symlink_metadata().is_ok() {
        return Ok(None);
    }
    if device::is_for_devices(path) {
        let shown = path.display();
        return Err(Refusal::invalid(format!("a file at {shown} would be memory"))
            .fix("name a path on a disk; ram:SIZE is a drive of memory"));
    }
    device::create_file(path, bytes)?;
    Ok(Some(path.clone()))
}

fn open_existing(opening: &Opening) -> Answer<(OpenDevice, Content)> {
    let shown = &opening.place;
    let is_new = |identity: Identity| {
        let known = opening.known.iter().find(|(_, known)| *known == identity);
        known.map_or(Ok(()), |(name, _)| {
            Err(Refusal::conflict(format!("{shown} is attached already, as drive {name}")))
        })
    };
    let mut device = match &opening.place {
        Place::Path(path) => {
            is_new(device::identify(path)?)?;
            OpenDevice::open(path)?
        }
        Place::Pci(address) => {
            is_new(Identity::Pci { address: *address })?;
            OpenDevice::open_pci(*address)?
        }
        Place::Remote(address, credentials) => {
            let device = OpenDevice::open_remote(address, opening.initiator, credentials)?;
            is_new(device.identity)?;
            device
        }
    };
    device.lossy = opening.lossy;
    let has = device.limits.bytes;
    if let Some(wanted) = opening.size_bytes.filter(|wanted| *wanted != has) {
        let (has, wanted) = (Size(has), Size(wanted));
        return Err(Refusal::conflict(format!("{shown} exists and has {has}, not {wanted}"))
            .fix("leave --size out to use it as it is"));
    }
    let content = device
        .content()
        .map_err(|error| Refusal::failed(format!("{shown} cannot be read: {error}")))?;
    Ok((device, content))
}

/// Refuses what may be someone's data.
fn check_content(shown: &Place, bytes: u64, content: &Content) -> Answer<()> {
    let fix = "if it may be lost, attach with --force; if not, use another drive";
    let see = match shown {
        Place::Path(path) => format!("see `ashlar inspect {}`; {fix}", path.display()),
        Place::Pci(_) | Place::Remote(..) => fix.to_owned(),
    };
    match content {
        Content::Blank => Ok(()),
        Content::Labelled(label) if label.drive_bytes <= bytes => Ok(()),
        Content::Labelled(label) => {
            let (has, had) = (Size(bytes), Size(label.drive_bytes));
            Err(Refusal::conflict(format!(
                "{shown} was cut short: its label speaks of {had} ({} bytes), it has {has}",
                label.drive_bytes
            ))
            .fix(cut::FIX))
        }
        Content::Damaged { why } => {
            Err(Refusal::conflict(format!("{shown} carries a damaged Ashlar label: {why}"))
                .fix(see))
        }
        Content::Newer { .. } => Err(Refusal::conflict(format!("{shown} carries {content}"))
            .fix(format!("start the ashlar that wrote it; {fix}"))),
        Content::Foreign(what) => {
            Err(Refusal::conflict(format!("{shown} carries data: {what}")).fix(fix))
        }
    }
}

/// What is proven to the target of a remote drive; no other drive asks for anything.
fn credentials(request: &DriveAttach) -> Answer<Credentials> {
    let DriveAttach { source, secret, controller_secret, .. } = request.clone();
    let is_remote = matches!(source, DriveSource::NvmeTcp(_));
    match (is_remote, &secret, &controller_secret) {
        (false, None, None) | (true, Some(_), _) | (true, None, None) => {
            Ok(Credentials { secret, controller_secret })
        }
        (false, _, _) => Err(Refusal::invalid(format!("{source} has no secret"))
            .fix("leave --secret and --controller-secret out")),
        (true, None, Some(_)) => {
            Err(Refusal::invalid("a target proves who it is only to a host that does")
                .fix("give this host's secret, too, with --secret FILE"))
        }
    }
}

fn memory_drive(memory: Memory, request: &DriveAttach) -> Answer<Attached> {
    let bytes = memory.bytes();
    let (least, size) = (device::DRIVE_BYTES_MIN, Size(bytes));
    if request.size_bytes.is_some() {
        return Err(Refusal::invalid("a drive of memory has its size in its name")
            .fix("use ram:SIZE or model:SIZE,…"));
    }
    if bytes < least || !bytes.is_multiple_of(4096) {
        return Err(Refusal::invalid(format!("{size} is no size for a drive of memory"))
            .fix(format!("use at least {}, and a multiple of 4K", Size(least))));
    }
    engine::check_room(bytes).map_err(|refusal| refusal.fix("use a smaller drive"))?;
    Ok(blank_memory(memory))
}

fn blank_memory(memory: Memory) -> Attached {
    Attached::new(Medium::Memory { memory, home: None }, Content::Blank)
}

fn check_model(model: &DriveModel) -> Answer<()> {
    let good = MODEL_IOPS.contains(&model.iops)
        && MODEL_MEGABYTES_PER_SECOND.contains(&model.megabytes_per_second)
        && model.latency_us <= MODEL_LATENCY_US_MAX;
    if good {
        return Ok(());
    }
    Err(Refusal::invalid("no drive is like that").fix(format!(
        "use iops={} to {}, mbps={} to {}, latency-us=0 to {MODEL_LATENCY_US_MAX}",
        MODEL_IOPS.start(),
        MODEL_IOPS.end(),
        MODEL_MEGABYTES_PER_SECOND.start(),
        MODEL_MEGABYTES_PER_SECOND.end(),
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_drive_that_never_answers_is_not_waited_for() {
        let (answer, never) = std::sync::mpsc::channel::<()>();
        let asked = blocking_for(Duration::from_millis(10), "d0", move || never.recv());
        let refusal = asked.await.unwrap_err();
        assert_eq!(refusal.error, "drive d0 does not answer");
        // The thread that waits ends with the test.
        drop(answer);
        let long = Duration::from_secs(3600);
        assert_eq!(blocking_for(long, "d0", || 7).await, Ok(7));
    }
}

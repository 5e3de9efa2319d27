//! What shall be: attached drives, known arrays, exports. Kept in the state directory.
//!
//! Invariants:
//! - the file is replaced as a whole: after a crash it is the old one or the new one;
//! - one daemon at a time has the directory;
//! - losing it loses no data: arrays assemble from the labels of their drives.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::api::drive::DriveSource;
use crate::api::export::ExportLimits;
use crate::device::{LET_GO_TIMEOUT, when_free};
use crate::front::{Front, nvme};
use crate::history;
use crate::refusal::{Answer, Refusal};
use crate::remote::Credentials;
use crate::secret::KeptSecrets;

const FILE: &str = "catalog.json";
const LOCK: &str = "lock";
/// What went wrong with drives: no daemon needs it to start anything.
const HISTORIES: &str = "drives.json";
/// Raised when an older daemon could not make sense of the file.
const VERSION: u32 = 10;
/// Read, too: it has no spares. Before 3 there are no epochs, and exports do not know which volume
/// they mean by its name; before 5 all of them are of one kind; before 6 nobody has a secret;
/// before 7 no array is here on demand; before 8 no drive was cut short; before 9 what a daemon
/// took that was killed is not known; before 10 all sockets are the daemon's user's alone.
const VERSION_OLDEST: u32 = 1;

/// Older ones have a consent to overwrite it, which is passed over: it went by the name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownDrive {
    pub source: DriveSource,
    #[serde(default, skip_serializing_if = "Credentials::are_none")]
    pub credentials: Credentials,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownArray {
    pub name: String,
    /// The generation this host saw last.
    pub generation: u64,
    /// Of the lease that this host took last; 0: it is not known. Of an array that was taken since,
    /// the generation says nothing either.
    #[serde(default)]
    pub epoch: u64,
    /// Drives (by the uuid of their label) that were trusted members then. Of any other drive the
    /// generation says nothing: the array may have gone on without it.
    #[serde(default)]
    pub current: BTreeSet<Uuid>,
    /// The epoch with which it came here: no other host has had it since.
    #[serde(default)]
    pub since: u64,
    /// Made when it was last started by force, perhaps from older drives than those of before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forced: Option<Uuid>,
    /// Of the last lease that a daemon took which was killed before it served the array; no other
    /// host had it between `epoch` and this one. 0: there was none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub taken: u64,
    /// Whether it shall run.
    pub started: bool,
    /// And if so, only while a guest needs it.
    #[serde(default, skip_serializing_if = "is_not")]
    pub on_demand: bool,
    /// Name of the drive that each member had last.
    #[serde(default)]
    pub drives: BTreeMap<u8, String>,
}

impl KnownArray {
    /// Up to this one no other host had the array since `since`.
    pub fn last_epoch(&self) -> u64 {
        self.epoch.max(self.taken)
    }

    /// What is to be known after a look at the running array; `None` if that is nothing new. Looks
    /// may arrive in another order than they were taken: an old one is nothing new. Nor is it that
    /// no drive here has everything: those who had it last still do.
    pub fn news(
        &self,
        generation: u64,
        current: BTreeSet<Uuid>,
        drives: BTreeMap<u8, String>,
    ) -> Option<KnownArray> {
        let current = if current.is_empty() { self.current.clone() } else { current };
        let news = KnownArray { generation, current, drives, ..self.clone() };
        (generation >= self.generation && *self != news).then_some(news)
    }
}

fn is_not(it: &bool) -> bool {
    !it
}

fn is_zero(it: &u64) -> bool {
    *it == 0
}

/// What front ends ask of a disk, also while its array is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownDisk {
    pub bytes: u64,
    pub discard_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownExport {
    pub array: Uuid,
    pub volume: String,
    /// The one that was exported; `None` until an export of an older version has started.
    #[serde(default)]
    pub volume_uuid: Option<Uuid>,
    pub front: Front,
    /// CPUs that an operator has chosen for its queues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Vec<usize>>,
    #[serde(default)]
    pub limits: ExportLimits,
    /// As it was when its array was here last; `None`: it never was since before version 7.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<KnownDisk>,
}

/// Older ones have a consent, as drives have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownSpare {
    /// `None`: for any array.
    pub array: Option<Uuid>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalog {
    version: u32,
    pub drives: BTreeMap<String, KnownDrive>,
    /// By the drive's name.
    #[serde(default)]
    pub spares: BTreeMap<String, KnownSpare>,
    pub arrays: BTreeMap<Uuid, KnownArray>,
    pub exports: BTreeMap<String, KnownExport>,
    /// Drives (by the uuid of their label) whose files were cut short: see `host::cut`.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub cut: BTreeSet<Uuid>,
}

/// The first that knows other exports than by vhost-user-blk.
const VERSION_OF_KINDS: u32 = 5;

/// Says of the exports of an older catalog of which kind they are.
fn give_kinds(stored: &mut Value) {
    let exports = stored.get_mut("exports").and_then(Value::as_object_mut);
    for export in exports.into_iter().flat_map(Map::values_mut).filter_map(Value::as_object_mut) {
        let its = ["socket", "queues"].map(|its| (its.to_owned(), export.remove(its)));
        let its: Map<_, _> = its.into_iter().filter_map(|(key, its)| Some((key, its?))).collect();
        export.insert("front".to_owned(), json!({ "vhost-user-blk": its }));
    }
}

/// What every version says.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Default for Catalog {
    fn default() -> Catalog {
        Catalog {
            version: VERSION,
            drives: BTreeMap::new(),
            spares: BTreeMap::new(),
            arrays: BTreeMap::new(),
            exports: BTreeMap::new(),
            cut: BTreeSet::new(),
        }
    }
}

impl Catalog {
    /// Has each export know the secrets that its hosts have in its subsystem.
    pub fn spread_secrets(&mut self) {
        let nqns: BTreeSet<String> = (self.exports.values())
            .filter_map(|export| export.front.subsystem().map(str::to_owned))
            .collect();
        for nqn in nqns {
            let all = self.secrets_of(&nqn);
            self.give_secrets(&nqn, &all);
        }
    }

    /// Of a subsystem.
    pub fn secrets_of(&self, nqn: &str) -> KeptSecrets {
        nvme::known_secrets(nqn, self.exports.values().map(|export| &export.front))
    }

    /// To the exports of a subsystem.
    pub fn give_secrets(&mut self, nqn: &str, all: &KeptSecrets) {
        nvme::give_secrets(nqn, all, self.exports.values_mut().map(|export| &mut export.front));
    }

    pub fn array_named(&self, name: &str) -> Option<(Uuid, &KnownArray)> {
        self.arrays.iter().find(|(_, array)| array.name == name).map(|(uuid, array)| (*uuid, array))
    }
}

/// The state directory, held by this daemon.
#[derive(Debug)]
pub struct StateDirectory {
    path: PathBuf,
    // Locked while this lives.
    _lock: File,
}

impl StateDirectory {
    /// Opens or makes the directory, and keeps other daemons out.
    pub fn open(path: &Path) -> Answer<StateDirectory> {
        let shown = path.display();
        let unusable = |error: io::Error| {
            Refusal::failed(format!("the state directory {shown} cannot be used: {error}"))
                .fix("name one that the daemon may write, by --state")
        };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(unusable)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.join(LOCK))
            .or_else(|error| {
                // What is known in a read-only one is known all the same.
                let read_only = error.kind() == io::ErrorKind::ReadOnlyFilesystem;
                if read_only { File::open(path.join(LOCK)) } else { Err(error) }
            })
            .map_err(unusable)?;
        let in_use = || {
            let refusal =
                Refusal::conflict(format!("another daemon uses the state directory {shown}"))
                    .fix("stop that one, or give this one another --state and --socket");
            Refusal { may_pass: true, ..refusal }
        };
        // One that was killed has it until its end.
        when_free(LET_GO_TIMEOUT, || match lock.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => Err(in_use()),
            Err(TryLockError::Error(error)) => Err(unusable(error)),
        })?;
        Ok(StateDirectory { path: path.to_owned(), _lock: lock })
    }

    /// The stored catalog; an empty one if nothing was ever stored.
    pub fn load(&self) -> Answer<Catalog> {
        StateDirectory::read(&self.path)
    }

    /// The same of a directory that another daemon may hold.
    pub fn read(directory: &Path) -> Answer<Catalog> {
        let path = directory.join(FILE);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Catalog::default()),
            Err(error) => {
                return Err(Refusal::failed(format!("{} cannot be read: {error}", path.display())));
            }
        };
        let fix = "restore it, or move it away, attach the drives again and run \
                   `ashlar array start --scan`";
        let damaged = |error: serde_json::Error| {
            Refusal::failed(format!("{} is damaged: {error}", path.display())).fix(fix)
        };
        let Versioned { version } = serde_json::from_slice(&text).map_err(damaged)?;
        if !(VERSION_OLDEST..=VERSION).contains(&version) {
            let text = format!("{} has version {version}", path.display());
            return Err(Refusal::failed(format!("{text}, which this build does not know"))
                .fix("start the ashlar that wrote it"));
        }
        let catalog = serde_json::from_slice(&text).and_then(|mut stored| {
            if version < VERSION_OF_KINDS {
                give_kinds(&mut stored);
            }
            serde_json::from_value::<Catalog>(stored)
        });
        let mut catalog = Catalog { version: VERSION, ..catalog.map_err(damaged)? };
        // Those who wrote it may not have.
        catalog.spread_secrets();
        Ok(catalog)
    }

    /// Replaces the stored catalog, durably.
    pub fn save(&self, catalog: &Catalog) -> Answer<()> {
        let text = serde_json::to_vec_pretty(catalog).map_err(io::Error::other);
        let saved = text.and_then(|text| self.replace(FILE, &text));
        saved.map_err(|error| self.unwritten("the catalog", &error))
    }

    /// What is known of drives' errors; nothing, where it cannot be read.
    pub fn load_histories(&self) -> history::Stored {
        let path = self.path.join(HISTORIES);
        let read = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Default::default(),
            Err(error) => Err(error),
        };
        read.unwrap_or_else(|error| {
            tracing::warn!("what went wrong with drives is forgotten: {}: {error}", path.display());
            Default::default()
        })
    }

    pub fn save_histories(&self, histories: &history::Stored) -> Answer<()> {
        let text = serde_json::to_vec_pretty(histories).map_err(io::Error::other);
        let saved = text.and_then(|text| self.replace(HISTORIES, &text));
        saved.map_err(|error| self.unwritten("what went wrong with drives", &error))
    }

    fn unwritten(&self, what: &str, error: &io::Error) -> Refusal {
        let path = self.path.display();
        let text = format!("{what} in {path} cannot be written: {error}");
        let fix = format!("make room in {path}, and let the daemon write there");
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => Refusal::no_space(text).fix(fix),
            _ => Refusal::failed(text).fix(fix),
        }
    }

    /// The uuid in the file of this name; a new one if there is none that can be read.
    pub fn keep_uuid(&self, name: &str) -> Answer<Uuid> {
        let stored = std::fs::read_to_string(self.path.join(name)).unwrap_or_default();
        if let Ok(uuid) = Uuid::try_parse(stored.trim()) {
            return Ok(uuid);
        }
        let uuid = Uuid::new_v4();
        let kept = self.replace(name, uuid.to_string().as_bytes());
        kept.map(|()| uuid).map_err(|error| self.unwritten(name, &error))
    }

    fn replace(&self, name: &str, text: &[u8]) -> io::Result<()> {
        let new = self.path.join(format!("{name}.new"));
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(text)?;
        file.write_all(b"\n")?;
        // Before the rename: a name that leads to bytes still in flight is an empty file after a
        // power cut.
        file.sync_all()?;
        std::fs::rename(&new, self.path.join(name))?;
        File::open(&self.path)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    //! Goal: the catalog is never lost, half written or shared.
    //! Method: save and load in a scratch directory, with leftovers of a crash beside it.

    use super::*;
    use crate::access::SocketAccess;
    use crate::refusal::RefusalKind;

    const FILE_NEW: &str = "catalog.json.new";

    fn filled() -> Catalog {
        let array = Uuid::from_bytes([7; 16]);
        let mut catalog = Catalog::default();
        let source = DriveSource::Path("/dev/nvme0n1".into());
        let credentials = Credentials::default();
        catalog.drives.insert("d0".into(), KnownDrive { source, credentials });
        let source = DriveSource::Ram(512 << 20);
        let secret = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
        let credentials = Credentials { secret: secret.parse().ok(), controller_secret: None };
        catalog.drives.insert("r0".into(), KnownDrive { source, credentials });
        let drives = BTreeMap::from([(0, "d0".to_owned()), (1, "r0".to_owned())]);
        let current = BTreeSet::from([array]);
        let (name, generation, epoch) = ("main".into(), 9, 3);
        let known = KnownArray {
            name,
            generation,
            epoch,
            current,
            since: 2,
            forced: Some(array),
            taken: 4,
            started: true,
            on_demand: true,
            drives,
        };
        catalog.arrays.insert(array, known);
        catalog.spares.insert("r0".into(), KnownSpare { array: Some(array) });
        let socket = "/run/ashlar/export/vm1.sock".into();
        let export = KnownExport {
            array,
            volume: "vol".into(),
            volume_uuid: Some(array),
            front: Front::VhostUserBlk { socket, queues: 4, access: SocketAccess::default() },
            cores: None,
            limits: ExportLimits { read_iops: Some(1000), ..ExportLimits::default() },
            disk: Some(KnownDisk { bytes: 1 << 30, discard_bytes: 192 << 10 }),
        };
        catalog.exports.insert("vm1".into(), export);
        catalog
    }

    #[test]
    fn an_old_look_is_no_news() {
        let mut known = filled().arrays.into_values().next().unwrap();
        let left = BTreeSet::from([Uuid::from_bytes([77; 16])]);
        known.current.extend(&left);
        let at = |generation, current: &BTreeSet<Uuid>| {
            known.news(generation, current.clone(), known.drives.clone())
        };
        assert_eq!(at(8, &left), None);
        assert_eq!(at(10, &left).map(|news| (news.generation, news.started)), Some((10, true)));
        // A drive is away, which the array has not noted yet.
        assert_eq!(at(9, &left).map(|news| news.current), Some(left));
        // All are.
        assert_eq!(at(9, &BTreeSet::new()), None);
        assert_eq!(at(9, &known.current), None);
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = StateDirectory::open(&scratch.path().join("a/b")).unwrap();
        assert_eq!(directory.load(), Ok(Catalog::default()));
        directory.save(&filled()).unwrap();
        assert_eq!(directory.load(), Ok(filled()));
        directory.save(&Catalog::default()).unwrap();
        assert_eq!(directory.load(), Ok(Catalog::default()));
    }

    #[test]
    fn a_crash_while_saving_leaves_the_old_one() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = StateDirectory::open(scratch.path()).unwrap();
        directory.save(&filled()).unwrap();
        std::fs::write(scratch.path().join(FILE_NEW), b"{\"version\":1,\"dri").unwrap();
        assert_eq!(directory.load(), Ok(filled()));
        directory.save(&filled()).unwrap();
        assert!(!scratch.path().join(FILE_NEW).exists());
    }

    #[test]
    fn a_second_daemon_is_kept_out() {
        let scratch = tempfile::tempdir().unwrap();
        let first = StateDirectory::open(scratch.path()).unwrap();
        let refusal = StateDirectory::open(scratch.path()).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Conflict);
        drop(first);
        StateDirectory::open(scratch.path()).unwrap();
    }

    #[test]
    fn a_damaged_or_newer_catalog_is_not_taken_for_an_empty_one() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = StateDirectory::open(scratch.path()).unwrap();
        for text in ["", "{", "[]", "{\"version\":1}"] {
            std::fs::write(scratch.path().join(FILE), text).unwrap();
            let refusal = directory.load().unwrap_err();
            assert!(refusal.fix.unwrap().contains("--scan"), "{text:?}");
        }
        let newer = r#"{"version":11,"drives":{},"arrays":{},"exports":{},"news":{}}"#;
        std::fs::write(scratch.path().join(FILE), newer).unwrap();
        assert!(directory.load().unwrap_err().error.contains("version 11"));
        let older = r#"{"version":1,"drives":{},"arrays":{},"exports":{}}"#;
        std::fs::write(scratch.path().join(FILE), older).unwrap();
        assert_eq!(directory.load(), Ok(Catalog::default()));
    }

    #[test]
    fn exports_of_an_older_catalog_are_kept() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = StateDirectory::open(scratch.path()).unwrap();
        let mut older = serde_json::to_value(filled()).unwrap();
        older["version"] = 4.into();
        let export = older["exports"]["vm1"].as_object_mut().unwrap();
        export.remove("front");
        export.remove("limits");
        export.insert("socket".to_owned(), "/run/ashlar/export/vm1.sock".into());
        export.insert("queues".to_owned(), 4.into());
        std::fs::write(scratch.path().join(FILE), older.to_string()).unwrap();
        let mut kept = filled();
        kept.exports.get_mut("vm1").unwrap().limits = ExportLimits::default();
        assert_eq!(directory.load(), Ok(kept));
    }

    /// As the version before this one wrote it: its arrays stay where they are.
    #[test]
    fn no_array_of_an_older_catalog_is_on_demand() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = StateDirectory::open(scratch.path()).unwrap();
        let mut older = serde_json::to_value(filled()).unwrap();
        older["version"] = 6.into();
        let arrays = older["arrays"].as_object_mut().unwrap();
        for its in arrays.values_mut().map(|its| its.as_object_mut().unwrap()) {
            its.retain(|field, _| !["on_demand", "since", "taken"].contains(&field.as_str()));
        }
        older["exports"]["vm1"].as_object_mut().unwrap().remove("disk");
        std::fs::write(scratch.path().join(FILE), older.to_string()).unwrap();
        let mut kept = filled();
        for its in kept.arrays.values_mut() {
            (its.on_demand, its.since, its.taken) = (false, 0, 0);
        }
        kept.exports.values_mut().for_each(|its| its.disk = None);
        assert_eq!(directory.load(), Ok(kept));
    }

    #[test]
    fn sockets_of_an_older_catalog_are_as_they_were() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = StateDirectory::open(scratch.path()).unwrap();
        let mut catalog = filled();
        let nbd = |access| Front::Nbd { socket: Some("/run/e".into()), listen: None, access };
        let mut export = catalog.exports["vm1"].clone();
        export.front = nbd(SocketAccess::default());
        catalog.exports.insert("e".into(), export);
        let mut older = serde_json::to_value(&catalog).unwrap();
        older["version"] = 9.into();
        assert!(!older.to_string().contains("access"));
        std::fs::write(scratch.path().join(FILE), older.to_string()).unwrap();
        assert_eq!(directory.load(), Ok(catalog.clone()));
        for export in catalog.exports.values_mut() {
            let mode = "0660".parse().ok();
            let user = Some("libvirt-qemu".into());
            *export.front.access_mut().unwrap() = SocketAccess { user, group: None, mode };
        }
        directory.save(&catalog).unwrap();
        assert_eq!(directory.load(), Ok(catalog));
    }

    #[test]
    fn a_failed_save_keeps_the_old_one() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = StateDirectory::open(scratch.path()).unwrap();
        directory.save(&filled()).unwrap();
        // A directory in the new file's place cannot be written, not even by root.
        std::fs::create_dir(scratch.path().join(FILE_NEW)).unwrap();
        assert!(directory.save(&Catalog::default()).is_err());
        assert_eq!(directory.load(), Ok(filled()));
    }
}

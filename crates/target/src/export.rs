//! What all front ends have in common for whoever starts and stops them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use ashlar_pool::volume::Volume;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::registry::Key;
use ashlar_reactor::traffic;

pub use crate::disk::Counters;

use crate::disk::{Disk, Trouble};
use crate::handed::Handed;
use crate::secrets::Secrets;

/// A reactor that serves an export, and the volume as it is known there.
pub struct Part {
    pub core: Sender,
    pub volume: Key<Volume>,
}

/// Why an export could not be started. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("{0}")]
    Spec(String),
    #[error("{0} is in use by another process")]
    Busy(PathBuf),
    /// The device of this path.
    #[error("{0} is held by the process that served it last")]
    Held(PathBuf),
    #[error("{0} exists and is not a socket")]
    NotSocket(PathBuf),
    /// What kept a file from being made and mounted, and what to do.
    #[error("{0}")]
    File(String),
    #[error("cannot listen at {path}: {error}")]
    Socket { path: PathBuf, error: std::io::Error },
    #[error("{path} cannot be given to another user or group: {error}")]
    Access { path: PathBuf, error: std::io::Error },
    #[error("cannot listen at {address}: {error}")]
    Address { address: SocketAddr, error: std::io::Error },
    #[error("the export's thread cannot be started: {0}")]
    Thread(std::io::Error),
    #[error("the volume is gone, or its reactor has stopped")]
    NoVolume,
    #[error(
        "a reactor does not say that it goes by what was set: until it does, hosts that were shut \
         out may go on there"
    )]
    Unheard,
}

/// What an export does at this moment.
#[derive(Clone, Debug, Default)]
pub struct ExportStatus {
    /// An initiator is there.
    pub connected: bool,
    /// Queues or connections that are in use, of each part.
    pub queues_of_parts: Vec<u16>,
    pub counters: Counters,
    /// From when a request was taken up until its initiator could see the answer, to a turn of the
    /// reactor.
    pub traffic: traffic::Report,
    /// How the front end and its initiators reach each other, where there are several ways.
    pub way: Option<String>,
    /// The last thing that went wrong, if anything did.
    pub last_error: Option<String>,
}

/// What one part of an export does.
pub(crate) struct PartStatus {
    connected: bool,
    in_use: u16,
    counters: Counters,
    traffic: traffic::Report,
    trouble: Option<Trouble>,
}

impl PartStatus {
    /// `in_use`: its queues or connections that are.
    pub(crate) fn of(disk: &Disk, connected: bool, in_use: usize) -> PartStatus {
        PartStatus {
            connected,
            in_use: u16::try_from(in_use).unwrap_or(u16::MAX),
            counters: disk.counters(),
            traffic: disk.traffic(),
            trouble: disk.trouble(),
        }
    }
}

/// How many of `what` there are, of which there may be 1 to `most`.
pub(crate) fn check_count(has: usize, most: u16, what: &str) -> Result<u16, ExportError> {
    let count = u16::try_from(has).ok().filter(|count| (1..=most).contains(count));
    count.ok_or_else(|| ExportError::Spec(format!("{has} {what}; 1 to {most} are possible")))
}

impl ExportStatus {
    pub(crate) fn of(parts: Vec<PartStatus>) -> ExportStatus {
        ExportStatus {
            connected: parts.iter().any(|part| part.connected),
            queues_of_parts: parts.iter().map(|part| part.in_use).collect(),
            counters: parts.iter().map(|part| part.counters).sum(),
            traffic: parts.iter().map(|part| part.traffic).sum(),
            way: None,
            last_error: parts.into_iter().find_map(|part| part.trouble).map(|its| its.to_string()),
        }
    }

    /// Queues or connections that are in use.
    pub fn queues_active(&self) -> u16 {
        self.queues_of_parts.iter().sum()
    }
}

/// What leads to an export in the file system.
pub trait Place: Send + Sync {
    /// Why nobody finds the export there any more; `None`: it can be found. Waits for that file
    /// system.
    fn lost(&self) -> Option<String>;
}

/// What an export knows of whether somebody needs its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Rings are started; or this kind of export cannot tell.
    InUse,
    /// No ring is started: nothing is under way, and nothing will be before one is.
    Idle,
    /// The same, and they were stopped while the guest's memory was copied: it goes elsewhere.
    Leaving,
}

/// One volume, offered. Dropping it stops the export: what is under way is answered, no more is
/// taken, and whoever is connected is disconnected.
///
/// Its functions wait for its reactors, so they are not for a reactor's own thread; and an export
/// must be stopped before any of them is.
pub trait Export: Send {
    /// The state now; `None` if a reactor has stopped, or does not answer.
    fn status(&self) -> Option<ExportStatus>;

    /// Whether its volume is needed here.
    fn usage(&self) -> Usage {
        Usage::InUse
    }

    /// Without which nobody new can come; `None`: it needs none.
    fn place(&self) -> Option<Arc<dyn Place>> {
        None
    }

    /// The volume has grown: initiators are told, where they listen for that.
    fn resized(&self);

    /// From now on writes up to so many bytes are there as a whole after a power cut, or not at
    /// all. Most protocols have no word for that.
    fn set_atomic_bytes(&self, _bytes: u32) {}

    /// From now on these hosts may use it (none: any), and this is what has to be proven by who
    /// connects. Who is connected stays so, unless it may not any more, or has to prove something
    /// now and never did. Returns when nothing is done any more for who may not. Most protocols
    /// know no hosts.
    fn set_access(&mut self, _hosts: &[String], _secrets: &Secrets) -> Result<(), ExportError> {
        Ok(())
    }

    /// It is about to be stopped, as are all that are told so before the first of them is: whoever
    /// loses all it has by that is disconnected, and does not see one go after the other. Most
    /// kinds share nothing.
    fn will_stop(&self) {}

    /// Comes to rest as if dropped, but whoever is connected stays so: for a process that takes the
    /// place of this one. `None`: it was stopped, since this kind cannot be handed over.
    fn hand_over(self: Box<Self>) -> Option<Handed<OwnedFd>> {
        drop(self);
        None
    }

    /// The process ends, and another one will come: what can outlive this one, and is in use, is
    /// left to it. Of most kinds nothing can: they stop as if dropped.
    fn pause(self: Box<Self>) {
        drop(self);
    }
}

//! An NVMe/TCP namespace of another host as a drive: our own initiator.
//!
//! Whoever uses it has an *association* of its own: one controller of the subsystem, with a
//! connection for questions and one for reads and writes. Who opened it (a [`Handle`]) has one
//! while it looks at labels; each reactor that it is registered with has one, which a thread
//! (`keeper`) makes, keeps alive, and makes anew. The reactor has only its connection for I/O.
//!
//! From the bottom: `wire` is a connection for who can wait; `authentication` proves who is there;
//! `association` is what goes over it until there is a queue; `claim` has a namespace open once;
//! `keeper` is the thread; `stream` is bytes and PDUs of the connection for I/O; `device` serves
//! operations with it.
//!
//! Sections are of the NVM Express Base Specification 2.0 ("Base") and its TCP Transport
//! Specification 1.0 ("TCP").
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

mod wire;
mod authentication;
mod association;
mod claim;
mod discovery;
mod keeper;
mod stream;
pub(crate) mod device;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::nvme::bounds::Bounds;
use crate::nvme::chap::Unproven;
use crate::nvme::command::Status;
use crate::nvme::pdu::{Digests, Fault};
use crate::nvme::power_cycle::PowerCycle;
use crate::nvme::remote::association::Association;
use crate::nvme::remote::claim::Claim;
use crate::nvme::remote::keeper::{Station, Work};

pub use crate::nvme::remote::association::{Identity, Name};
pub use crate::nvme::remote::authentication::Credentials;
pub use crate::nvme::remote::discovery::{Offer, offers};
pub use crate::nvme::remote::keeper::Report;

/// For so long a drive may be away before it counts as gone: less than who uses it waits for an
/// answer, so that this is what it hears.
pub const AWAY_MAX: Duration = Duration::from_millis(8500);
/// Quiesce time (CQT) of a controller whose drive, if it has no cache that forgets, outlives that
/// its connections fall silent while something is written: no sign of life shows it, no reset
/// succeeds, the former controller is waited for, and a second is left to connect again and to be
/// answered.
pub const QUIESCE_BORNE: Duration = AWAY_MAX
    .saturating_sub(SIGN_EVERY)
    .saturating_sub(SIGN_WITHIN)
    .saturating_sub(END_WITHIN)
    .saturating_sub(KEEP_ALIVE)
    .saturating_sub(Duration::from_secs(1));
/// How long the controller may hear nothing of us before it gives the association up (KATO).
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// A sign of life is given so often.
const SIGN_EVERY: Duration = Duration::from_millis(500);
/// How long the answer to one may take.
const SIGN_WITHIN: Duration = Duration::from_secs(2);
/// How long it may take to let go of the association.
const END_WITHIN: Duration = Duration::from_millis(500);
/// How long it may take for a question.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// Which namespace, where it is, and who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// A name or an address.
    pub host: String,
    pub port: u16,
    /// Its NQN.
    pub subsystem: String,
    pub namespace: u32,
    pub digests: Digests,
    pub host_nqn: String,
    pub host_id: [u8; 16],
    /// `None`: this host proves nothing.
    pub credentials: Option<Credentials>,
}

/// Why a namespace cannot be used, or no longer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    #[error("its name cannot be resolved: {0}")]
    Unresolved(String),
    #[error("it cannot be reached: {0}")]
    Unreachable(String),
    #[error("the connection is lost: {0}")]
    Lost(String),
    #[error("it has not answered for too long ({0})")]
    Silent(&'static str),
    #[error("it said what cannot be ({0})")]
    Absurd(&'static str),
    #[error("it said what cannot be: {0}")]
    Fault(#[from] Fault),
    #[error("it refused {what}: {status:?}")]
    Refused { what: &'static str, status: Status },
    #[error("it has no such subsystem, or not for us")]
    NoSubsystem,
    #[error("it does not let this host in")]
    Stranger,
    #[error("it wants hosts to prove who they are, and this one was given no secret for it")]
    Authentication,
    #[error("{0}")]
    Unproven(#[from] Unproven),
    #[error("it does not ask this host to prove who it is, and so does not prove it either")]
    NotAsked,
    #[error("it wants a secure channel (TLS), which is not known here")]
    SecureChannel,
    #[error("it does not want the digests that were asked for")]
    NoDigests,
    #[error("there is no namespace {wanted}, but {}", listed(.has))]
    NoNamespace { wanted: u32, has: Vec<u32> },
    #[error("it is not like a drive that can be used: {0}")]
    Unsuitable(&'static str),
    #[error("it is attached already, or was detached and has not ended what it was asked")]
    Taken,
    #[error("it was let go")]
    LetGo,
    #[error("another namespace is there now")]
    Another,
    #[error("it was away, and writes may be lost that its cache had")]
    Forgetful,
    #[error("it was away for too long: {0}")]
    Away(Box<Trouble>),
    #[error("it was lost again and again: {0}")]
    Unsteady(Box<Trouble>),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Trouble {
        Trouble::Lost(error.to_string())
    }
}

fn listed(namespaces: &[u32]) -> String {
    match namespaces {
        [] => "none at all".to_owned(),
        all => all.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// A remote namespace, for who opened it. Reads and writes of it wait; they end, whatever the other
/// side does.
pub struct Handle {
    station: Arc<Station>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.station.identity.fmt(f)
    }
}

impl Handle {
    /// A namespace is open once at a time in a process: [`Trouble::Taken`].
    pub fn open(target: Target) -> Result<Handle, Trouble> {
        let association = Association::open(&target)?;
        let claim = match Claim::take(&target.subsystem, association.identity()) {
            Ok(claim) => claim,
            Err(trouble) => {
                // Nothing was asked of it that matters.
                let _ = association.end();
                return Err(trouble);
            }
        };
        Ok(Handle { station: Arc::new(Station::new(target, association, claim)) })
    }

    /// Nobody waits for it any more: where its connection is lost, what was asked of it ends, and
    /// is not asked again.
    pub fn let_go(&self) {
        self.station.let_go();
    }

    pub fn target(&self) -> &Target {
        &self.station.target
    }

    /// As it was when it was opened.
    pub fn identity(&self) -> &Identity {
        &self.station.identity
    }

    /// Since when it had power when it was last connected to; `None`: it did not say.
    pub fn power(&self) -> Option<PowerCycle> {
        self.station.power()
    }

    /// How reactors reach it.
    pub fn report(&self) -> Report {
        self.station.report()
    }

    /// How many bytes it has now; or why it is not there, or not the same as before.
    pub fn look(&self) -> Result<u64, Trouble> {
        let association = self.station.open().inspect_err(|why| self.station.still_lost(why))?;
        // Nothing was asked of it that matters.
        let _ = association.end();
        self.station.seen();
        Ok(self.station.bytes())
    }

    /// Ends the connection of who opened it, if that was not used for half a second; there is
    /// another when it is needed. Waits for the other side.
    pub fn rest_if_unused(&self) {
        self.station.rest_if_unused();
    }

    fn bounds(&self) -> Bounds {
        let identity = self.identity();
        Bounds {
            block_bytes: identity.its.block_bytes(),
            bytes: self.station.bytes(),
            write_zeroes: identity.controller.write_zeroes,
            volatile_cache: identity.controller.volatile_cache,
        }
    }

    /// Fills `bytes`; they and `offset` are whole blocks.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.station.with(Work::Read, |association| association.read(offset, bytes)).map_err(failed)
    }

    /// The other way.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.station
            .with(Work::Write, |association| association.write(offset, bytes))
            .map_err(failed)
    }

    pub fn flush(&self) -> io::Result<()> {
        self.station.with(Work::Flush, Association::flush).map_err(failed)
    }
}

impl Drop for Handle {
    /// Its end waits for the other side, and a reactor may have been the last to have it.
    fn drop(&mut self) {
        let station = self.station.clone();
        let thread = std::thread::Builder::new().name("nvme-remote".into());
        // Without a thread its connections are just closed.
        let _ = thread.spawn(move || station.rest());
    }
}

fn failed(trouble: Trouble) -> io::Error {
    io::Error::other(trouble.to_string())
}

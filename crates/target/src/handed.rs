//! What a process hands to the one that takes its place, so that initiators which are connected
//! notice nothing: open files, and what was agreed on them.
//!
//! `F` is how a file is named: the file itself, or whatever it is named by on the way.

use serde::{Deserialize, Serialize};

/// An export that listens, and perhaps serves someone. Nothing is under way in it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handed<F> {
    pub(crate) listener: F,
    pub(crate) front_end: Option<FrontEnd<F>>,
}

/// A vhost-user front end: all that it has said and that counts.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FrontEnd<F> {
    pub(crate) stream: F,
    /// For messages from us to it.
    pub(crate) channel: Option<F>,
    pub(crate) write_back: bool,
    pub(crate) told: Told<F>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Told<F> {
    pub(crate) features: u64,
    pub(crate) protocol: u64,
    pub(crate) memory: Vec<Region<F>>,
    pub(crate) inflight: Option<Inflight<F>>,
    /// Of written pages. A process that knows of no such log hands none over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) log: Option<Log<F>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) log_bell: Option<F>,
    pub(crate) rings: Vec<Ring<F>>,
}

/// Of guest memory, in bytes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Region<F> {
    pub(crate) guest: u64,
    pub(crate) user: u64,
    pub(crate) len: u64,
    pub(crate) offset: u64,
    pub(crate) file: F,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Inflight<F> {
    pub(crate) len: u64,
    pub(crate) offset: u64,
    pub(crate) queues: u16,
    pub(crate) size: u16,
    pub(crate) file: F,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Log<F> {
    pub(crate) len: u64,
    pub(crate) offset: u64,
    pub(crate) file: F,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ring<F> {
    pub(crate) size: u32,
    /// Descriptors, available, used.
    pub(crate) addresses: Option<[u64; 3]>,
    /// Where what is written there is marked, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) marked: Option<u64>,
    pub(crate) base: u32,
    pub(crate) started: bool,
    pub(crate) enabled: bool,
    pub(crate) kick: Option<F>,
    pub(crate) call: Option<F>,
    pub(crate) error: Option<F>,
}

impl<F> Default for Ring<F> {
    fn default() -> Ring<F> {
        let (kick, call, error) = (None, None, None);
        let (size, base, addresses, marked) = (0, 0, None, None);
        Ring { size, addresses, marked, base, started: false, enabled: false, kick, call, error }
    }
}

impl<F> Told<F> {
    pub(crate) fn new(rings: u16) -> Told<F> {
        let rings = (0..rings).map(|_| Ring::default()).collect();
        let (memory, inflight, log, log_bell) = (Vec::new(), None, None, None);
        Told { features: 0, protocol: 0, memory, inflight, log, log_bell, rings }
    }
}

impl<F> Handed<F> {
    /// The same with files named otherwise; `None` where `name` says so for any of them.
    pub fn rename<G>(self, name: &mut impl FnMut(F) -> Option<G>) -> Option<Handed<G>> {
        let listener = name(self.listener)?;
        let front_end = match self.front_end {
            Some(front_end) => Some(front_end.rename(name)?),
            None => None,
        };
        Some(Handed { listener, front_end })
    }
}

impl<F> FrontEnd<F> {
    fn rename<G>(self, name: &mut impl FnMut(F) -> Option<G>) -> Option<FrontEnd<G>> {
        let FrontEnd { stream, channel, write_back, told } = self;
        let Told { features, protocol, memory, inflight, log, log_bell, rings } = told;
        let stream = name(stream)?;
        let channel = rename_one(channel, name)?;
        let region = |Region { guest, user, len, offset, file }| {
            Some(Region { guest, user, len, offset, file: name(file)? })
        };
        let memory = memory.into_iter().map(region).collect::<Option<_>>()?;
        let inflight = match inflight {
            Some(Inflight { len, offset, queues, size, file }) => {
                Some(Inflight { len, offset, queues, size, file: name(file)? })
            }
            None => None,
        };
        let log = match log {
            Some(Log { len, offset, file }) => Some(Log { len, offset, file: name(file)? }),
            None => None,
        };
        let log_bell = rename_one(log_bell, name)?;
        let rings = rings.into_iter().map(|ring| ring.rename(name)).collect::<Option<_>>()?;
        let told = Told { features, protocol, memory, inflight, log, log_bell, rings };
        Some(FrontEnd { stream, channel, write_back, told })
    }
}

impl<F> Ring<F> {
    fn rename<G>(self, name: &mut impl FnMut(F) -> Option<G>) -> Option<Ring<G>> {
        let Ring { size, addresses, marked, base, started, enabled, kick, call, error } = self;
        let (kick, call) = (rename_one(kick, name)?, rename_one(call, name)?);
        let error = rename_one(error, name)?;
        Some(Ring { size, addresses, marked, base, started, enabled, kick, call, error })
    }
}

/// A file that need not be there.
fn rename_one<F, G>(file: Option<F>, name: &mut impl FnMut(F) -> Option<G>) -> Option<Option<G>> {
    match file {
        Some(file) => name(file).map(Some),
        None => Some(None),
    }
}

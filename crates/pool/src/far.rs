//! A volume of another reactor: each request is a call to the one that its array lives on; but for
//! reads of what is plain to see, which are done here (`ashlar_raid::viewer`).
//!
//! Invariants:
//! - a request has ended there before it is answered here, so what is promised of requests of one
//!   reactor is true of those of several: a flush makes durable what any of them was answered;
//! - nothing is read here for longer than the array's reactor was sure of the array when it was
//!   last asked, however long this one was held up.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::time::Duration;

use ashlar_format::units::{Area, to_usize};
use ashlar_raid::block_status::BlockStatus;
use ashlar_raid::error::ArrayError;
use ashlar_raid::viewer::Viewer;
use ashlar_raid::zero_step::{ZeroStep, Zeroing};
use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::call::{Caller, CallerEnd};
use ashlar_reactor::executor::Reactor;

use crate::thick::{Glimpse, ranges};

/// How often the array's reactor is asked what is plain to see. For so long drives may be kept from
/// who wants them back.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// What is asked; offsets and lengths in bytes. The data is memory that is lent along.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Request {
    Read {
        offset: u64,
    },
    Write {
        offset: u64,
    },
    Flush,
    Discard {
        offset: u64,
        len: u64,
    },
    WriteZeroes {
        offset: u64,
        len: u64,
    },
    /// How much to zero at a time.
    ZeroStep {
        zeroing: Zeroing,
        offset: u64,
        len: u64,
    },
    /// How much of it is alike.
    BlockStatus {
        offset: u64,
        len: u64,
    },
    /// Nothing but how large it is.
    Look,
    /// What may be read without asking, or whether what was shown still may.
    Show {
        has: bool,
    },
}

pub(crate) struct Answer {
    pub(crate) done: Result<(), ArrayError>,
    /// Size of the volume by now.
    pub(crate) bytes: u64,
    pub(crate) shown: Option<Box<Glimpse>>,
    /// What was shown is so for this time at least.
    pub(crate) holds_for: Duration,
    pub(crate) step: ZeroStep,
    pub(crate) status: BlockStatus,
}

/// What a volume says of itself.
pub(crate) struct Facts {
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) discard_bytes: u64,
}

/// What is plain to see.
struct Sight {
    viewer: Viewer,
    bytes: u64,
    extents: Vec<Area>,
    until: Cell<Instant>,
}

impl Sight {
    fn ranges(&self, offset: u64, len: u64) -> Option<impl Iterator<Item = Range<u64>>> {
        let end = offset.checked_add(len).filter(|end| *end <= self.bytes)?;
        Some(ranges(&self.extents, offset..end).into_iter())
    }
}

pub struct Far {
    reactor: Reactor,
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
    /// As of the last answer.
    pub(crate) bytes: Cell<u64>,
    pub(crate) discard_bytes: u64,
    caller: Rc<Caller<Request, Answer>>,
    sight: RefCell<Option<Rc<Sight>>>,
}

impl Drop for Far {
    fn drop(&mut self) {
        let caller = self.caller.clone();
        self.reactor.spawn(async move { caller.close().await });
    }
}

impl Far {
    pub(crate) fn open(
        reactor: &Reactor,
        facts: Facts,
        caller: CallerEnd<Request, Answer>,
    ) -> Rc<Far> {
        let Facts { uuid, name, bytes, discard_bytes } = facts;
        let far = Rc::new(Far {
            reactor: reactor.clone(),
            uuid,
            name,
            bytes: Cell::new(bytes),
            discard_bytes,
            caller: caller.open(reactor),
            sight: RefCell::default(),
        });
        reactor.spawn(watch(Rc::downgrade(&far), reactor.clone()));
        far
    }

    async fn ask(&self, request: Request, memory: Buffers) -> Result<(), ArrayError> {
        let Answer { done, bytes, .. } = self.caller.call(request, memory).await;
        self.bytes.set(bytes);
        done
    }

    /// What may be read without asking, if that is still so.
    fn sight(&self) -> Option<Rc<Sight>> {
        let sight = self.sight.borrow();
        let sight = sight.as_ref().filter(|sight| self.reactor.turn_time() <= sight.until.get());
        sight.cloned()
    }

    /// Lets the drives go if there is nothing to be seen any more, and asks what there is.
    async fn look_around(&self) {
        let asked = self.reactor.now();
        let seen = self.sight.take().filter(|sight| sight.viewer.is_open());
        let request = Request::Show { has: seen.is_some() };
        *self.sight.borrow_mut() = seen;
        let Answer { bytes, shown, holds_for, .. } =
            self.caller.call(request, Buffers::default()).await;
        self.bytes.set(bytes);
        let until = asked.after(holds_for);
        match shown {
            Some(glimpse) => {
                let Glimpse { shown, bytes, extents } = *glimpse;
                let viewer = Viewer::open(&self.reactor, shown);
                let sight = Sight { viewer, bytes, extents, until: Cell::new(until) };
                *self.sight.borrow_mut() = Some(Rc::new(sight));
            }
            None => self.sight.borrow().iter().for_each(|sight| sight.until.set(until)),
        }
    }

    pub(crate) async fn read(&self, offset: u64, into: Buffers) -> Result<(), ArrayError> {
        if let Some(sight) = self.sight()
            && self.read_seen(&sight, offset, &into).await
        {
            return Ok(());
        }
        self.ask(Request::Read { offset }, into).await
    }

    /// False: it is to be asked for.
    async fn read_seen(&self, sight: &Sight, offset: u64, into: &Buffers) -> bool {
        let Some(ranges) = sight.ranges(offset, into.len() as u64) else { return false };
        let mut done = 0;
        for range in ranges {
            let end = done + to_usize(range.end - range.start);
            if !sight.viewer.read(range.start, &into.slice(done..end)).await {
                return false;
            }
            done = end;
        }
        // The host may have stood still meanwhile, and the array be another's.
        self.reactor.turn_time() <= sight.until.get()
    }

    pub(crate) async fn write(&self, offset: u64, from: Buffers) -> Result<(), ArrayError> {
        self.ask(Request::Write { offset }, from).await
    }

    pub(crate) async fn flush(&self) -> Result<(), ArrayError> {
        self.ask(Request::Flush, Buffers::default()).await
    }

    pub(crate) async fn look(&self) {
        // An array that was stopped says how large the volume was.
        let _ = self.ask(Request::Look, Buffers::default()).await;
    }

    pub(crate) async fn discard(&self, offset: u64, len: u64) -> Result<(), ArrayError> {
        self.ask(Request::Discard { offset, len }, Buffers::default()).await
    }

    pub(crate) async fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), ArrayError> {
        self.ask(Request::WriteZeroes { offset, len }, Buffers::default()).await
    }

    pub(crate) async fn block_status(
        &self,
        offset: u64,
        len: u64,
    ) -> Result<BlockStatus, ArrayError> {
        let request = Request::BlockStatus { offset, len };
        let Answer { done, bytes, status, .. } =
            self.caller.call(request, Buffers::default()).await;
        self.bytes.set(bytes);
        done.map(|()| status)
    }

    pub(crate) async fn zero_step(
        &self,
        zeroing: Zeroing,
        offset: u64,
        len: u64,
    ) -> Result<ZeroStep, ArrayError> {
        let request = Request::ZeroStep { zeroing, offset, len };
        let Answer { done, bytes, step, .. } = self.caller.call(request, Buffers::default()).await;
        self.bytes.set(bytes);
        done.map(|()| step)
    }
}

/// Looks around until the volume is let go.
async fn watch(far: Weak<Far>, reactor: Reactor) {
    while let Some(far) = far.upgrade() {
        far.look_around().await;
        drop(far);
        reactor.sleep(LOOK_AGAIN).await;
    }
}

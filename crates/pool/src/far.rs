//! A volume of another reactor: each request is a call to the one that its array lives on.
//!
//! Invariant: a request has ended there before it is answered here, so what is promised of requests
//! of one reactor is true of those of several: a flush makes durable what any of them was answered.

use std::cell::Cell;
use std::rc::Rc;

use ashlar_raid::error::ArrayError;
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::call::{Caller, CallerEnd};
use ashlar_reactor::executor::Reactor;

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
    /// Nothing but how large it is.
    Look,
    Discard {
        offset: u64,
        len: u64,
    },
    WriteZeroes {
        offset: u64,
        len: u64,
    },
}

pub(crate) struct Answer {
    pub(crate) done: Result<(), ArrayError>,
    /// Size of the volume by now.
    pub(crate) bytes: u64,
}

/// What a volume says of itself.
pub(crate) struct Facts {
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) discard_bytes: u64,
}

pub struct Far {
    reactor: Reactor,
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
    /// As of the last answer.
    pub(crate) bytes: Cell<u64>,
    pub(crate) discard_bytes: u64,
    caller: Rc<Caller<Request, Answer>>,
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
        let (bytes, caller) = (Cell::new(bytes), caller.open(reactor));
        Rc::new(Far { reactor: reactor.clone(), uuid, name, bytes, discard_bytes, caller })
    }

    async fn ask(&self, request: Request, memory: Buffers) -> Result<(), ArrayError> {
        let Answer { done, bytes } = self.caller.call(request, memory).await;
        self.bytes.set(bytes);
        done
    }

    pub(crate) async fn read(&self, offset: u64, into: Buffers) -> Result<(), ArrayError> {
        self.ask(Request::Read { offset }, into).await
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
}

//! How a volume reaches another reactor: it is offered on its own, and opened there.

use std::io;

use ashlar_reactor::call::{CalleeEnd, CallerEnd, calls};
use ashlar_reactor::executor::Reactor;

use crate::far::{Answer, Facts, Far, Request};
use crate::volume::Volume;

/// A volume on its way to another reactor.
pub struct Offer {
    facts: Facts,
    caller: CallerEnd<Request, Answer>,
}

impl Offer {
    /// On the reactor that the volume lives on. An error: the system has no more files.
    pub fn new(reactor: &Reactor, volume: Volume) -> io::Result<Offer> {
        let (caller, callee) = calls()?;
        let facts = Facts {
            uuid: volume.uuid(),
            name: volume.name().to_owned(),
            bytes: volume.bytes(),
            discard_bytes: volume.discard_bytes(),
        };
        serve(callee, reactor, volume);
        Ok(Offer { facts, caller })
    }

    /// On the other reactor.
    pub fn open(self, reactor: &Reactor) -> Volume {
        Volume::Far(Far::open(reactor, self.facts, self.caller))
    }
}

/// Does what is asked of the volume, until the other reactor has let it go.
fn serve(callee: CalleeEnd<Request, Answer>, reactor: &Reactor, volume: Volume) {
    callee.serve(reactor, async move |request, memory| {
        let done = match request {
            Request::Read { offset } => volume.read(offset, memory).await,
            Request::Write { offset } => volume.write(offset, memory).await,
            Request::Flush => volume.flush().await,
            Request::Look => {
                volume.look().await;
                Ok(())
            }
            Request::Discard { offset, len } => volume.discard(offset, len).await,
            Request::WriteZeroes { offset, len } => volume.write_zeroes(offset, len).await,
        };
        Answer { done, bytes: volume.bytes() }
    });
}

//! How a volume reaches another reactor: it is offered on its own, and opened there.

use std::io;
use std::time::Duration;

use ashlar_raid::block_status::BlockStatus;
use ashlar_raid::zero_step::ZeroStep;
use ashlar_reactor::call::{CalleeEnd, CallerEnd, calls};
use ashlar_reactor::executor::Reactor;

use crate::far::{Answer, Facts, Far, Request};
use crate::thick::Glimpse;
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
        let (mut shown, mut holds_for) = (None, Duration::ZERO);
        let (mut step, mut status) = (ZeroStep::default(), BlockStatus::default());
        let done = match request {
            Request::Read { offset } => volume.read(offset, memory).await,
            Request::Write { offset } => volume.write(offset, memory).await,
            Request::Flush => volume.flush().await,
            Request::ZeroStep { zeroing, offset, len } => {
                let found = volume.zero_step(zeroing, offset, len).await;
                found.map(|found| step = found)
            }
            Request::BlockStatus { offset, len } => {
                let found = volume.block_status(offset, len).await;
                found.map(|found| status = found)
            }
            Request::Look => {
                volume.look().await;
                Ok(())
            }
            Request::Show { has } => {
                (shown, holds_for) = show(&volume, has);
                Ok(())
            }
            Request::Discard { offset, len } => volume.discard(offset, len).await,
            Request::WriteZeroes { offset, len } => volume.write_zeroes(offset, len).await,
        };
        Answer { done, bytes: volume.bytes(), shown, holds_for, step, status }
    });
}

/// What may be read of the volume without asking, or whether what was shown still may.
fn show(volume: &Volume, has: bool) -> (Option<Box<Glimpse>>, Duration) {
    match volume {
        Volume::Thick(thick) => {
            let shown = if has { None } else { thick.show().map(Box::new) };
            (shown, thick.array.shown_for())
        }
        // Whoever wants to see it asks its own reactor.
        Volume::Far(_) => (None, Duration::ZERO),
    }
}

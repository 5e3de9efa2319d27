//! What this host remembers of which drives have everything, before anything is acknowledged that
//! others lack. (The watch, which looks about every second, keeps the rest of that memory fresh.)

use std::sync::Arc;

use ashlar_pool::pool::Pool;
use ashlar_raid::witness::{Tell, Testimony};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::registry::Key;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use uuid::Uuid;

use crate::host::Host;

/// A reactor's word of an array that it runs.
pub struct Told {
    array: Uuid,
    core: usize,
    pool: Key<Pool>,
    testimony: Testimony,
}

/// For an array that is about to run.
pub(super) struct Teller {
    core: usize,
    to: UnboundedSender<Told>,
}

impl Teller {
    /// Takes effect with [`ashlar_raid::array::Array::set_witness`].
    pub(super) fn of(self, array: Uuid, pool: Key<Pool>) -> Tell {
        let Teller { core, to } = self;
        Box::new(move |testimony| to.send(Told { array, core, pool, testimony }).is_ok())
    }
}

/// What is written down at once: many arrays may lose drives in one moment.
const AT_ONCE: usize = 256;

/// Runs as long as the daemon does.
pub async fn hear(host: Arc<Host>, mut told: UnboundedReceiver<Told>) {
    let mut heard = Vec::new();
    while told.recv_many(&mut heard, AT_ONCE).await > 0 {
        host.remember(&heard);
        heard.drain(..).for_each(|told| host.answer(told));
    }
}

impl Host {
    /// For an array on this reactor.
    pub(super) fn teller(&self, core: usize) -> Teller {
        Teller { core, to: self.told.clone() }
    }

    fn remember(&self, heard: &[Told]) {
        let runs = self.look(|state| state.arrays.clone());
        let recorded = self.record(|catalog| {
            for Told { array, pool, testimony, .. } in heard {
                // It may have been stopped since, and started from fewer drives.
                let is_other = runs.get(array).is_some_and(|running| running.pool != *pool);
                let Some(known) = catalog.arrays.get_mut(array).filter(|_| !is_other) else {
                    continue;
                };
                let current = testimony.current.iter().copied().map(Uuid::from_bytes).collect();
                let news = known.news(testimony.generation, current, known.drives.clone());
                news.into_iter().for_each(|news| *known = news);
            }
        });
        if let Err(refusal) = recorded {
            // Guests do not wait for that.
            tracing::error!("{}", refusal.line());
        }
    }

    fn answer(&self, told: Told) {
        let Told { core, pool, testimony, .. } = told;
        let answered = self.core(core).send(move |reactor: &Reactor| {
            if let Some(pool) = reactor.get(pool) {
                pool.array().witness_has_heard(testimony.generation);
            }
        });
        // One that has stopped waits for nothing.
        drop(answered);
    }
}

//! What this host remembers of which drives have everything, before anything is acknowledged that
//! others lack. (The watch, which looks about every second, keeps the rest of that memory fresh.)

use std::sync::Arc;

use ashlar_pool::pool::Pool;
use ashlar_raid::witness::{Tell, Testimony};
use ashlar_reactor::registry::Key;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use uuid::Uuid;

use crate::engine;
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
    pub(super) core: usize,
    pub(super) to: UnboundedSender<Told>,
}

impl Teller {
    /// Takes effect with [`ashlar_raid::array::Array::set_witness`].
    pub(super) fn of(self, array: Uuid, pool: Key<Pool>) -> Tell {
        let Teller { core, to } = self;
        Box::new(move |testimony| to.send(Told { array, core, pool, testimony }).is_ok())
    }
}

/// Runs as long as the daemon does.
pub async fn hear(host: Arc<Host>, mut told: UnboundedReceiver<Told>) {
    while let Some(told) = told.recv().await {
        host.remember(told).await;
    }
}

impl Host {
    async fn remember(&self, told: Told) {
        let Told { array, core, pool, testimony: Testimony { generation, current } } = told;
        let current = current.into_iter().map(Uuid::from_bytes).collect();
        let recorded = self.record(|catalog| {
            let known = catalog.arrays.get_mut(&array);
            let news =
                known.as_ref().and_then(|its| its.news(generation, current, its.drives.clone()));
            known.zip(news).into_iter().for_each(|(known, news)| *known = news);
        });
        if let Err(refusal) = recorded {
            // Guests do not wait for that.
            tracing::error!(array = self.array_name(array), "{}", refusal.line());
        }
        let answer = move |reactor: &ashlar_reactor::executor::Reactor| {
            if let Some(pool) = reactor.get(pool) {
                pool.array().witness_has_heard(generation);
            }
        };
        // One that does not answer has other troubles, which are told elsewhere.
        let _ = engine::look(self.core(core), answer).await;
    }
}

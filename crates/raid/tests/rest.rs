//! Goal: an array that nobody uses lets its reactor sleep, and is looked after again at once when
//! somebody does.
//! Method: a clock that jumps from one thing to do to the next, which are counted.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_raid::settings::SettingsChange;
use ashlar_reactor::backend::{Backend, Instant};
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::{Device, DeviceId, Done, Op, Ticket};
use ashlar_reactor::virtual_time::VirtualBackend;

use crate::modelled::{LATENCY, full_array};

#[derive(Default)]
struct Counting {
    world: VirtualBackend,
    sleeps: Rc<Cell<u64>>,
}

impl Backend for Counting {
    fn now(&self) -> Instant {
        self.world.now()
    }

    fn register(&mut self, device: Device) -> DeviceId {
        self.world.register(device)
    }

    fn unregister(&mut self, device: DeviceId) {
        self.world.unregister(device);
    }

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        self.world.submit(ticket, op, until);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        self.world.reap(done);
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        self.sleeps.set(self.sleeps.get() + 1);
        self.world.idle(until)
    }
}

#[test]
fn an_idle_array_lets_its_reactor_sleep() {
    let backend = Counting::default();
    let sleeps = backend.sleeps.clone();
    let reactor = Reactor::new(Box::new(backend), Order::Fifo);
    let r = reactor.clone();
    let ran = reactor.block_on(async move {
        let kind = (Level::Raid5, 3);
        let array = full_array(&r, kind, SettingsChange::default(), |_| LATENCY).await;
        for _ in 0..2 {
            // Regions are cleaned, and what the drives did is forgotten.
            r.sleep(Duration::from_secs(30)).await;
            assert_eq!(array.status().dirty_regions, 0);
            let before = sleeps.get();
            r.sleep(Duration::from_secs(60)).await;
            let slept = sleeps.get() - before;
            assert!(slept <= 20, "{slept} sleeps in a minute");
            array.write(0, r.buffer(4096).into()).await.unwrap();
            // It is looked after in a quarter of a second, as long as there is something to do.
            let before = sleeps.get();
            r.sleep(Duration::from_secs(2)).await;
            let slept = sleeps.get() - before;
            assert!(slept >= 7, "{slept} sleeps in two seconds");
        }
        array.stop().await.unwrap();
    });
    assert!(ran.is_some());
    reactor.abandon();
}

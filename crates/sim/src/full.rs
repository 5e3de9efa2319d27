//! What some drives are made of has no space for a while, as a file system or a thin volume has
//! none: writes are refused where they need some, and may have landed in part.
//!
//! Requests may fail meanwhile, and nobody is behind for it. With space again everything works as
//! before, without a start.

use std::rc::Rc;
use std::time::Duration;

use ashlar_format::units::Area;
use ashlar_reactor::prng::Prng;

use crate::outage::RETRIED_WITHIN;
use crate::workload::Life;

pub async fn full(life: &Rc<Life>, prng: &mut Prng) {
    let areas = life.plan.areas();
    let all = Area { offset: 0, len: life.fleet.borrow().bytes() };
    let area = [all, areas.data, areas.journal, areas.journal, areas.superblocks][prng.index(5)];
    let mut drives = life.fleet.borrow().slots.clone();
    let count = [1, drives.len(), 1 + prng.index(drives.len())][prng.index(3)];
    while drives.len() > count {
        drives.swap_remove(prng.index(drives.len()));
    }
    let longest = [1_000_000, 100_000_000, 40_000_000_000][prng.index(3)];
    let long = Duration::from_nanos(prng.below(longest));
    life.outage_begins();
    life.world.borrow_mut().is_short = true;
    life.note(|| format!("NO SPACE in {area:?} of drives {drives:?} for {long:?}"));
    set(life, &drives, Some(area));
    life.reactor.sleep(long).await;
    set(life, &drives, None);
    // What was refused is tried again.
    life.heard_of_all().await;
    life.reactor.sleep(RETRIED_WITHIN).await;
    life.note(|| "there is space again".into());
    {
        let mut world = life.world.borrow_mut();
        world.outages.full += 1;
        world.is_short = false;
    }
    life.refresh_fleet();
    life.outage_ends(true);
}

fn set(life: &Life, drives: &[u32], area: Option<Area>) {
    let mut world = life.world.borrow_mut();
    drives.iter().for_each(|drive| world.drive(*drive).full = area);
}

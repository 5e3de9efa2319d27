//! Volumes beside the main one come, grow, go, and others come in their place.

use std::rc::Rc;

use ashlar_pool::error::PoolError;
use ashlar_raid::error::ArrayError;
use ashlar_reactor::prng::Prng;

use crate::served::NAMES;
use crate::volumes::Extent;
use crate::workload::Life;

/// What becomes of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Create,
    Resize,
    Delete,
}

/// Those that are missing come, some of them, before requests do.
pub async fn come(life: &Rc<Life>, prng: &mut Prng) {
    for index in 0..NAMES.len() {
        if life.others.get(index).is_none() && prng.chance(2, 3) {
            create(life, index, prng).await;
        }
    }
}

/// One of them changes.
pub async fn change(life: &Rc<Life>, prng: &mut Prng) {
    let index = prng.index(NAMES.len());
    if life.others.get(index).is_none() {
        return create(life, index, prng).await;
    }
    match prng.below(4) {
        0 => delete(life, index).await,
        1 => {
            delete(life, index).await;
            // In its place, if there is no better one.
            create(life, index, prng).await;
        }
        2 => resize(life, index, 512 * (1 + prng.below(9))).await,
        _ => resize(life, index, life.array.stripe_bytes()).await,
    }
}

async fn create(life: &Rc<Life>, index: usize, prng: &mut Prng) {
    if life.pool.volume(NAMES[index]).is_some() {
        return;
    }
    let bytes = life.array.stripe_bytes() * (1 + prng.below(3)) - 512 * prng.below(9);
    let uuid = life.oracle.borrow_mut().volumes.new_uuid();
    begin(life, index, Some(bytes));
    let turns = life.outage_turns();
    let done = life.pool.create(uuid, NAMES[index], bytes).await.map(drop);
    end(life, index, (Change::Create, Some(bytes)), turns, done);
}

async fn resize(life: &Rc<Life>, index: usize, more: u64) {
    let Some(volume) = life.pool.volume(NAMES[index]) else { return };
    let bytes = volume.bytes() + more;
    begin(life, index, Some(bytes));
    let turns = life.outage_turns();
    let done = life.pool.resize(NAMES[index], bytes).await;
    end(life, index, (Change::Resize, Some(bytes)), turns, done);
}

async fn delete(life: &Rc<Life>, index: usize) {
    life.others.hide(index);
    life.waiting.until(&life.reactor, || !life.others.is_used(index)).await;
    begin(life, index, None);
    let turns = life.outage_turns();
    let done = life.pool.delete(NAMES[index]).await;
    end(life, index, (Change::Delete, None), turns, done);
}

fn begin(life: &Life, index: usize, then: Extent) {
    life.oracle.borrow_mut().volumes.change_begins(NAMES[index], then);
}

fn end(
    life: &Life,
    index: usize,
    (change, then): (Change, Extent),
    turns: u64,
    done: Result<(), PoolError>,
) {
    let name = NAMES[index];
    life.note(|| format!("{change:?} volume {name} to {then:?}: {done:?}"));
    {
        let mut oracle = life.oracle.borrow_mut();
        if done.is_ok() {
            oracle.volumes.changed(name, then);
        }
        life.others.look(index, &life.pool, &mut oracle);
    }
    life.world.borrow_mut().volumes_made += u64::from(change == Change::Create && done.is_ok());
    match done {
        Ok(()) | Err(PoolError::Array(ArrayError::Stopped)) => {}
        Err(PoolError::Array(error)) if life.may_not_fail(turns) => {
            life.fail(format!("{change:?} of volume {name} failed: {error}"));
        }
        Err(_) => {}
    }
}

//! Goal: the host knows which drives have everything before anything is acknowledged that others
//! lack; and guests do not wait for ever for a host that cannot write that down.
//! Method: a witness that answers when the test says so, while a member is away and a write begins.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_format::units::MemberIndex;
use ashlar_raid::error::ArrayError;
use ashlar_raid::witness::{PATIENCE, Testimony};
use ashlar_reactor::executor::Reactor;

use crate::pair::{Begun, Pair, begin, run};

/// What a witness was told.
type Told = Rc<RefCell<Vec<Testimony>>>;

/// A mirror whose second half is away, and a write to it.
async fn fencing(reactor: &Reactor, is_there: bool) -> (Pair, Told, Begun<Result<(), ArrayError>>) {
    let pair = Pair::new(reactor, Level::Raid1, 2, 512).await;
    let told = Told::default();
    let hears = told.clone();
    pair.array.set_witness(Box::new(move |testimony| {
        hears.borrow_mut().push(testimony);
        is_there
    }));
    pair.array.pull_member(MemberIndex(1)).unwrap();
    let (array, bytes) = (pair.array.clone(), reactor.buffer(512));
    bytes.fill_zero();
    let write = begin(reactor, async move { array.write(0, bytes.into()).await });
    while told.borrow().is_empty() {
        reactor.sleep(Duration::from_millis(1)).await;
    }
    (pair, told, write)
}

#[test]
fn a_write_waits_until_the_fence_is_remembered() {
    run(|reactor| async move {
        let (pair, told, write) = fencing(&reactor, true).await;
        reactor.sleep(PATIENCE / 10).await;
        assert!(!write.has_ended());
        let testimony = told.borrow()[0].clone();
        let members = pair.array.status().members;
        assert_eq!(testimony.current, [members[0].drive_uuid]);
        pair.array.witness_has_heard(testimony.generation);
        write.ended(&reactor).await.unwrap();
        assert!(pair.array.status().generation >= testimony.generation);
        // The others need no word of it.
        let mut pair = pair;
        pair.put(0, &[1; 4096]).await;
        assert_eq!(told.borrow().len(), 1);
    });
}

#[test]
fn nor_does_it_wait_for_ever() {
    run(|reactor| async move {
        let began = reactor.now();
        let (_pair, _told, write) = fencing(&reactor, true).await;
        write.ended(&reactor).await.unwrap();
        assert!(reactor.now().since(began) >= PATIENCE);
        // Where nobody hears it, not at all.
        let (_pair, _told, write) = fencing(&reactor, false).await;
        let began = reactor.now();
        write.ended(&reactor).await.unwrap();
        assert!(reactor.now().since(began) < PATIENCE);
    });
}

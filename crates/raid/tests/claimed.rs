//! Goal: this host starts half of a mirror that it had last, also after starts of it that came to
//! nothing; not after another host had it.
//! Method: one host's start dies, or fails at a superblock, before anybody hears of it.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState};
use ashlar_format::drive_label::MemberLayout;
use ashlar_raid::array::Array;
use ashlar_raid::error::AssembleError;
use ashlar_raid::label;
use ashlar_raid::lease::{self, Host};
use ashlar_raid::member::Member;
use ashlar_raid::start::{ArraySpec, AssembleOptions, Known};
use ashlar_reactor::executor::Reactor;

use crate::pair::{DRIVE_BYTES, Pair, run_on};
use crate::steered::{Fate, Steer, is_write, offset};

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Steer) -> F) {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| test(reactor, steer));
}

/// A mirror that died here, what its host knows of it, and its first half.
async fn died(reactor: &Reactor) -> (Pair, Known, Rc<Drive>) {
    let spec = ArraySpec { host: Some(here()), ..Pair::spec(Level::Raid1) };
    let mut pair = Pair::made(reactor, &spec, &[DRIVE_BYTES; 2], 512).await;
    pair.write_some(20).await;
    pair.in_place().await;
    let status = pair.array.status();
    let known = Known { generation: status.generation, epoch: status.epoch, is_here: true };
    let half = pair.drives().swap_remove(0);
    pair.dies();
    (pair, known, half)
}

fn plan() -> MemberLayout {
    label::plan(DRIVE_BYTES, 1).unwrap()
}

fn here() -> Host {
    Host::new([7; 16], "here")
}

fn ours(known: Known) -> AssembleOptions {
    let (known, host) = (Some(known), Some(here()));
    AssembleOptions { known, host, ..AssembleOptions::default() }
}

/// All that comes of a start which dies as soon as it has the array.
async fn claim(pair: &mut Pair, half: &Rc<Drive>, host: &Host) {
    let (uuid, drive) = (pair.array.status().members[0].drive_uuid, pair.plug_in(half));
    let member = Member::new(uuid, Some(drive), plan(), MemberState::Trusted);
    lease::take(&pair.reactor, pair.array.uuid(), &[member], host, Some(0)).await.unwrap();
}

async fn start(
    pair: &mut Pair,
    half: &Rc<Drive>,
    options: AssembleOptions,
) -> Result<(), AssembleError> {
    let drives = vec![pair.plug_in(half)];
    pair.array = Array::assemble(&pair.reactor, drives, options).await?;
    Ok(())
}

#[test]
fn a_start_that_died_does_not_bar_the_next() {
    run(|reactor, _| async move {
        let (mut pair, known, half) = died(&reactor).await;
        claim(&mut pair, &half, &here()).await;
        start(&mut pair, &half, ours(known)).await.unwrap();
        pair.check().await;
        pair.dies();
    });
}

#[test]
fn a_start_that_failed_does_not_bar_the_next() {
    run(|reactor, steer| async move {
        let (mut pair, known, half) = died(&reactor).await;
        let options = ours(known);
        let superblocks = plan().superblocks.range();
        steer.set(move |_, op| {
            let is_one = is_write(op) && offset(op).is_some_and(|at| superblocks.contains(&at));
            if is_one { Fate::Fails } else { Fate::Passes }
        });
        start(&mut pair, &half, options).await.unwrap_err();
        steer.set(|_, _| Fate::Passes);
        start(&mut pair, &half, options).await.unwrap();
        pair.check().await;
        pair.dies();
    });
}

#[test]
fn a_start_that_died_on_another_host_does() {
    run(|reactor, _| async move {
        let (mut pair, known, half) = died(&reactor).await;
        claim(&mut pair, &half, &Host::new([8; 16], "there")).await;
        let started = start(&mut pair, &half, ours(known)).await;
        assert_eq!(started, Err(AssembleError::MaybeOld));
    });
}

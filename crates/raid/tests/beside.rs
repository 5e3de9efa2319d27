//! Goal: beside parity whoever is away is fenced with any that is, whatever that one was fenced
//! for: else it is believed, and both of them together tell what the array no longer has.
//! Method: policy `none`, and a write in which the one has a part and the other has none; then both
//! are started by force. Neither those that have the write are filled from them, nor are all of
//! them put together.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::os::unix::fs::FileExt;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::error::ArrayError;
use ashlar_reactor::executor::Reactor;

use crate::apart::{is_apart, is_used_elsewhere, start};
use crate::pair::{DRIVE_BYTES, Pair, run, run_on};
use crate::steered::{Fate, Steer, address, superblock};

struct Four {
    pair: Pair,
    drives: Vec<Rc<Drive>>,
    /// Has the first chunk.
    misses: MemberIndex,
    /// Has the second.
    idle: MemberIndex,
    /// Have the parity of both.
    others: [MemberIndex; 2],
}

impl Four {
    async fn new(reactor: &Reactor) -> Four {
        let mut pair = Pair::new(reactor, Level::Raid6, 4, 512).await;
        pair.array.set_policy(Policy::None).await.unwrap();
        pair.put(0, &[1; 4096]).await;
        pair.in_place().await;
        pair.array.flush().await.unwrap();
        let (drives, layout) = (pair.drives(), pair.array.layout());
        let at = |position| layout.member_at(StripeIndex(0), position);
        Four { pair, drives, misses: at(0), idle: at(1), others: [at(2), at(3)] }
    }

    fn drive(&self, member: MemberIndex) -> &Rc<Drive> {
        &self.drives[member.index()]
    }

    /// The write, then.
    async fn are_told_apart(mut self) {
        self.pair.put(0, &[2; 4096]).await;
        let half = [self.misses, self.idle].map(|its| self.drive(its).clone());
        start(&mut self.pair, &half.each_ref(), true).await.unwrap();
        assert_eq!(self.pair.read(0, 4096).await.unwrap(), [1; 4096]);
        let [other, _] = self.others;
        let drive = self.drive(other).clone();
        is_used_elsewhere(&mut self.pair, other, &drive).await;
        is_apart(&mut self.pair, &self.drives.iter().collect::<Vec<_>>()).await;
        self.pair.dies();
    }
}

#[test]
fn one_that_missed_something() {
    run(|reactor| async move {
        let four = Four::new(&reactor).await;
        four.pair.array.pull_member(four.idle).unwrap();
        four.pair.array.pull_member(four.misses).unwrap();
        four.are_told_apart().await;
    });
}

#[test]
fn one_that_was_replaced() {
    run(|reactor| async move {
        let mut four = Four::new(&reactor).await;
        four.pair.array.pull_member(four.idle).unwrap();
        four.pair.array.pull_member(four.misses).unwrap();
        four.pair.replace(four.misses.0).await;
        four.pair.rebuilt().await;
        four.are_told_apart().await;
    });
}

/// A superblock has no room, and who was asked to take it is gone when there is some.
#[test]
fn one_that_no_superblock_told_of_at_first() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let four = Four::new(&reactor).await;
        let full = address(four.pair.file(four.drive(four.idle)));
        steer.set(move |file, op| match superblock(op) {
            Some(_) if file == full => Fate::Full,
            _ => Fate::Passes,
        });
        four.pair.array.pull_member(four.misses).unwrap();
        let write = four.pair.array.write(0, reactor.buffer(4096).into()).await;
        assert_eq!(write, Err(ArrayError::NoSpace));
        four.pair.array.pull_member(four.idle).unwrap();
        steer.set(|_, _| Fate::Passes);
        four.are_told_apart().await;
    });
}

#[test]
fn one_that_came_with_a_copy_of_before() {
    run(|reactor| async move {
        let mut four = Four::new(&reactor).await;
        four.pair.array.stop().await.unwrap();
        let mut before = vec![0; DRIVE_BYTES as usize];
        let file = four.pair.file(four.drive(four.misses)).clone();
        file.read_exact_at(&mut before, 0).unwrap();
        for _ in 0..2 {
            start(&mut four.pair, &four.drives.iter().collect::<Vec<_>>(), false).await.unwrap();
            four.pair.array.stop().await.unwrap();
        }
        file.write_all_at(&before, 0).unwrap();
        let [other, last] = four.others;
        let here = [four.misses, other, last].map(|its| four.drive(its).clone());
        start(&mut four.pair, &here.each_ref(), false).await.unwrap();
        four.are_told_apart().await;
    });
}

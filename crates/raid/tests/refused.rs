//! Goal: a start that the journal refuses leaves the drives as they were.
//! Method: a crash while a write stands in the journal only; then a batch of a newer format, or one
//! that cannot be read where members are absent; every byte of every drive is compared.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::os::unix::fs::FileExt;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::journal_batch::{JournalBatch, VERSION};
use ashlar_format::record::{MAGIC, payload_checksum};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::AssembleError;
use ashlar_raid::label;
use ashlar_raid::start::AssembleOptions;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;

use crate::pair::{DRIVE_BYTES, Pair, run_on};
use crate::steered::{Fate, Steer, address, offset};

async fn crashed(reactor: &Reactor) -> (Pair, Vec<Rc<Drive>>) {
    let mut pair = Pair::new(reactor, Level::Raid5, 4, 512).await;
    pair.array.set_policy(Policy::Journal).await.unwrap();
    pair.put(0, &[1; 512]).await;
    let members = pair.array.status().members;
    let drives: Vec<_> = members.into_iter().map(|member| member.drive.unwrap()).collect();
    drives.iter().for_each(|drive| drive.pull());
    (pair, drives)
}

fn bytes_of(pair: &Pair, drives: &[Rc<Drive>]) -> Vec<Vec<u8>> {
    let all = drives.iter().map(|drive| {
        let mut bytes = vec![0; DRIVE_BYTES as usize];
        pair.file(drive).read_exact_at(&mut bytes, 0).unwrap();
        bytes
    });
    all.collect()
}

async fn refused(pair: &mut Pair, drives: &[Rc<Drive>]) -> AssembleError {
    let before = bytes_of(pair, drives);
    let drives: Vec<_> = drives.iter().map(|drive| pair.plug_in(drive)).collect();
    let options = AssembleOptions::default();
    let error = Array::assemble(&pair.reactor, drives.clone(), options).await.err().unwrap();
    drives.iter().for_each(|drive| drive.pull());
    assert!(bytes_of(pair, &drives) == before, "something was written: {error}");
    error
}

async fn starts(pair: &mut Pair, drives: &[Rc<Drive>]) {
    let drives: Vec<_> = drives.iter().map(|drive| pair.plug_in(drive)).collect();
    let options = AssembleOptions::default();
    pair.array = Array::assemble(&pair.reactor, drives, options).await.unwrap();
    pair.check().await;
    pair.array.stop().await.unwrap();
}

/// Members with a batch where the ring begins.
fn with_batch(pair: &Pair, drives: &[Rc<Drive>]) -> Vec<usize> {
    let at = label::plan(DRIVE_BYTES, 1).unwrap().journal.offset;
    let has = |drive: &Rc<Drive>| {
        let mut magic = [0; MAGIC.len()];
        pair.file(drive).read_exact_at(&mut magic, at).unwrap();
        magic == MAGIC
    };
    (0..drives.len()).filter(|index| has(&drives[*index])).collect()
}

#[test]
fn by_a_batch_of_a_newer_format() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let (mut pair, drives) = crashed(&reactor).await;
        let at = label::plan(DRIVE_BYTES, 1).unwrap().journal.offset;
        let with = &drives[with_batch(&pair, &drives)[0]];
        let mut bytes = vec![0; JournalBatch::BYTES as usize];
        pair.file(with).read_exact_at(&mut bytes, at).unwrap();
        let was = bytes.clone();
        bytes[10..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
        bytes[16..20].fill(0);
        let sum = payload_checksum(&bytes);
        bytes[16..20].copy_from_slice(&sum.to_le_bytes());
        pair.file(with).write_all_at(&bytes, at).unwrap();
        let error = refused(&mut pair, &drives).await;
        let newer = matches!(error, AssembleError::Newer { what: "journal", .. });
        assert!(newer, "{error}");
        pair.file(with).write_all_at(&was, at).unwrap();
        starts(&mut pair, &drives).await;
    });
}

#[test]
fn by_a_batch_that_nobody_can_read() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let (mut pair, drives) = crashed(&reactor).await;
        let at = label::plan(DRIVE_BYTES, 1).unwrap().journal.offset;
        let with = with_batch(&pair, &drives);
        let (absent, unreadable) = (with[0], with[1]);
        let file = address(pair.file(&drives[unreadable]));
        let reads = move |op: &Op| matches!(op, Op::Read { .. }) && offset(op) == Some(at);
        steer.set(move |its, op| if its == file && reads(op) { Fate::Fails } else { Fate::Passes });
        let mut here = drives.clone();
        here.remove(absent);
        let member = MemberIndex::new(unreadable);
        assert_eq!(refused(&mut pair, &here).await, AssembleError::JournalUnreadable { member });
        steer.set(|_, _| Fate::Passes);
        starts(&mut pair, &drives).await;
    });
}

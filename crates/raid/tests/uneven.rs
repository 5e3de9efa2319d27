//! Goal: drives of different size make one array; one with a smaller journal may leave and come
//! back while the journal of the others is fuller than its own could be.
//! Method: reads of the others wait, so that nothing is put in place, until it has joined; in one
//! case the process dies then. Everything is compared with a plain copy.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::label;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;

use crate::pair::{Pair, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

const LARGE: u64 = 160 << 20;
const SMALL: u64 = 25 << 20;
const JOINS: MemberIndex = MemberIndex(2);
/// Rows that are written of each stripe: all of one chunk, so that parity must be read for it.
const ROWS: usize = 16 << 10;

fn journal(drive: u64) -> u64 {
    label::plan(drive, 1).unwrap().journal.len
}

/// Degraded, with more in the journal than the small drive has room for; nothing can be read.
async fn overfull(reactor: &Reactor, steer: &Steer) -> Pair {
    let mut pair = Pair::on(reactor, Level::Raid5, &[LARGE, LARGE, SMALL]).await;
    pair.array.set_policy(Policy::Journal).await.unwrap();
    pair.bytes.resize(8 << 20, 0);
    for at in 0..8 {
        pair.put(at << 20, &vec![at as u8 + 1; 1 << 20]).await;
    }
    assert_eq!(pair.array.status().journal.bytes, journal(SMALL));
    pair.array.pull_member(JOINS).unwrap();
    pair.put(0, &[9; 512]).await;
    pair.in_place().await;
    assert_eq!(pair.array.status().journal.bytes, journal(LARGE));
    let members = pair.array.status().members;
    let joins = address(pair.file(&members[JOINS.index()].drive.clone().unwrap()));
    let data = label::plan(LARGE, 1).unwrap().data.offset;
    steer.set(move |file, op| match offset(op) {
        Some(at) if file != joins && at >= data && !is_write(op) => Fate::Waits,
        _ => Fate::Passes,
    });
    let stripe = pair.array.stripe_bytes() as usize;
    for at in 0..200 {
        pair.put(at * stripe, &[at as u8; ROWS]).await;
    }
    let used = pair.array.status().journal.used_bytes;
    assert!(used > journal(SMALL), "{used} bytes");
    pair
}

#[test]
fn a_member_with_a_smaller_journal_joins_a_full_one() {
    for dies in [false, true] {
        let steer = Steer::new();
        run_on(steer.backend(), |reactor| async move {
            let mut pair = overfull(&reactor, &steer).await;
            let old = pair.array.status().members[JOINS.index()].drive.clone().unwrap();
            let drive = pair.plug_in(&old);
            pair.array.replace_member(JOINS, drive, [77; 16]).await.unwrap();
            assert_eq!(pair.array.status().members[JOINS.index()].state, MemberState::Rebuilding);
            if dies {
                for member in pair.array.status().members {
                    member.drive.unwrap().pull();
                }
                steer.drop_waiting(&reactor).await;
                pair.crash_without(&[]).await;
            }
            steer.set(|_, _| Fate::Passes);
            pair.write_some(40).await;
            pair.rebuilt().await;
            assert_eq!(pair.array.state(), ArrayState::Optimal);
            assert_eq!(pair.array.status().journal.bytes, journal(SMALL));
            pair.write_some(40).await;
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        });
    }
}

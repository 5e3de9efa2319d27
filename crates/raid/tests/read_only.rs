//! Goal: a drive that takes no writes any more is read on while its array cannot do without it.
//! Method: arrays that have no redundancy left, under virtual time; then one drive fails all its
//! writes for a while.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::health::HealthState;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::DeviceId;
use ashlar_reactor::prng::Prng;

use crate::modelled::{LATENCY, ReadOnly, full_array, rebuild, run_read_only};

const BLOCK: u64 = 4096;
/// What the array is filled with.
const FIRST: u8 = 7;

/// An array and what its blocks may hold, where that is not what it was filled with.
struct Subject {
    reactor: Reactor,
    array: Rc<Array>,
    blocks: BTreeMap<u64, Vec<u8>>,
    prng: Prng,
}

impl Subject {
    async fn write(&mut self, value: u8) -> bool {
        let block = self.prng.below(self.array.capacity() / BLOCK);
        let bytes = self.reactor.buffer(BLOCK as usize);
        bytes.copy_from_slice(&[value; BLOCK as usize]);
        let written = self.array.write(block * BLOCK, bytes.into()).await.is_ok();
        let may_hold = self.blocks.entry(block).or_insert_with(|| vec![FIRST]);
        if written {
            may_hold.clear();
        }
        may_hold.push(value);
        written
    }

    async fn write_some(&mut self, value: u8) -> usize {
        let mut written = 0;
        for _ in 0..200 {
            written += usize::from(self.write(value).await);
        }
        written
    }

    /// Every sector.
    async fn check(&self) {
        let into = self.reactor.buffer(BLOCK as usize);
        for block in 0..self.array.capacity() / BLOCK {
            self.array.read(block * BLOCK, into.clone().into()).await.unwrap();
            let may_hold = self.blocks.get(&block).map_or(&[FIRST][..], Vec::as_slice);
            for sector in into.bytes().chunks(512) {
                let is_known = may_hold.iter().any(|value| sector.iter().all(|its| its == value));
                assert!(is_known, "block {block} is {} and not {may_hold:?}", sector[0]);
            }
        }
    }
}

async fn is_read_on(
    reactor: Reactor,
    read_only: ReadOnly,
    (level, members, lost): (Level, usize, &[u8]),
    policy: Policy,
) {
    let array =
        full_array(&reactor, (level, members), SettingsChange::default(), |_| LATENCY).await;
    array.set_policy(policy).await.unwrap();
    let prng = Prng::from_seed(3);
    let mut subject =
        Subject { reactor: reactor.clone(), array: array.clone(), blocks: BTreeMap::new(), prng };
    assert_eq!(subject.write_some(8).await, 200);
    // Nobody writes; that the others are gone is all that there is to be said.
    read_only.set(Some(DeviceId(0)));
    lost.iter().for_each(|index| array.pull_member(MemberIndex(*index)).unwrap());
    reactor.sleep(Duration::from_secs(60)).await;
    let health = || array.status().members[0].drive.as_ref().unwrap().health().state;
    assert_eq!(array.state(), ArrayState::Degraded);
    assert_eq!(health(), HealthState::Suspect);
    subject.check().await;
    assert!(subject.write_some(9).await < 200);
    assert_eq!(health(), HealthState::Suspect);
    subject.check().await;
    reactor.sleep(Duration::from_secs(60)).await;
    read_only.set(None);
    reactor.sleep(Duration::from_secs(60)).await;
    assert_eq!(subject.write_some(10).await, 200);
    if !lost.is_empty() {
        rebuild(&reactor, &array, lost).await;
    }
    assert_eq!(array.state(), ArrayState::Optimal);
    subject.check().await;
    array.stop().await.unwrap();
}

fn all(kind: (Level, usize, &'static [u8])) {
    for policy in [Policy::Journal, Policy::Bitmap] {
        println!("{kind:?}, {policy:?}");
        run_read_only(|reactor, read_only| is_read_on(reactor, read_only, kind, policy));
    }
}

#[test]
fn a_drive_that_takes_no_writes_is_read_on_beside_one_parity() {
    all((Level::Raid5, 3, &[1]));
}

#[test]
fn a_drive_that_takes_no_writes_is_read_on_beside_two_parities() {
    all((Level::Raid6, 4, &[1, 3]));
}

#[test]
fn a_drive_that_takes_no_writes_is_read_on_as_the_only_copy() {
    all((Level::Raid1, 2, &[1]));
}

//! Goal: what starts that died have left on some drives does not decide what came after.
//! Method: an array with two parity chunks of which single writes of metadata are never done, or
//! torn; a write that stands in a part of its stripe when all die; and then drives that are lost.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::region_map::RegionMapPage;
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::array::Array;
use ashlar_raid::label;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_reactor::executor::Reactor;
use zerocopy::FromBytes;

use crate::pair::{Begun, DRIVE_BYTES, Pair, begin, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset, superblock};

const CHUNK: usize = 16 << 10;

struct Six {
    pair: Pair,
    steer: Steer,
    drives: Vec<Rc<Drive>>,
    /// Of the first stripe: of its second chunk.
    idle: MemberIndex,
    /// And of its parity.
    parity: [MemberIndex; 2],
}

impl Six {
    async fn new(reactor: &Reactor, steer: Steer, policy: Policy) -> Six {
        let spec = ArraySpec { policy: Some(policy), ..Pair::spec(Level::Raid6) };
        let mut pair = Pair::made(reactor, &spec, &[DRIVE_BYTES; 4], 512).await;
        let all = pair.bytes.len();
        pair.put(0, &vec![1; all]).await;
        pair.array.stop().await.unwrap();
        let (drives, layout) = (pair.drives(), pair.array.layout());
        let at = |position| layout.member_at(StripeIndex(0), position);
        Six { pair, steer, drives, idle: at(1), parity: [at(2), at(3)] }
    }

    fn file(&self, member: MemberIndex) -> usize {
        address(self.pair.file(&self.drives[member.index()]))
    }

    fn but(&self, member: MemberIndex) -> Vec<Rc<Drive>> {
        let others = self.drives.iter().enumerate().filter(|(its, _)| *its != member.index());
        others.map(|(_, drive)| drive.clone()).collect()
    }

    async fn starts_with(&mut self, drives: &[Rc<Drive>]) {
        self.pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
    }

    /// All are there, and die when all that is left waits.
    async fn start_that_dies(&mut self) {
        let reactor = self.pair.reactor.clone();
        let drives: Vec<_> = self.drives.clone().iter().map(|its| self.pair.plug_in(its)).collect();
        let (its, on) = (drives.clone(), reactor.clone());
        let options = AssembleOptions::default();
        let start = async move { Array::assemble(&on, its, options).await.map(drop) };
        let start = begin(&reactor, start);
        self.steer.caught(&reactor, 1).await;
        self.all_waits(&start).await;
        drives.iter().for_each(|drive| drive.pull());
        self.steer.drop_waiting(&reactor).await;
        start.ended(&reactor).await.unwrap_err();
    }

    /// Until no more comes to wait.
    async fn all_waits<T>(&self, begun: &Begun<T>) {
        let mut waiting = 0;
        while waiting != self.steer.waiting() {
            assert!(!begun.has_ended());
            waiting = self.steer.waiting();
            self.pair.reactor.sleep(Duration::from_millis(50)).await;
        }
    }

    /// A write that has come in the first chunk only, and its region is marked.
    async fn begins_a_write(&self) -> Begun<bool> {
        let data = label::plan(DRIVE_BYTES, 2).unwrap().data;
        let late = self.parity.map(|its| self.file(its));
        self.steer.set(move |file, op| match offset(op) {
            Some(at) if is_write(op) && data.range().contains(&at) && late.contains(&file) => {
                Fate::Waits
            }
            _ => Fate::Passes,
        });
        let write = self.write(0, 2);
        self.steer.caught(&self.pair.reactor, 2).await;
        self.all_waits(&write).await;
        write
    }

    fn write(&self, at: u64, value: u8) -> Begun<bool> {
        let array = self.pair.array.clone();
        let buffer = self.pair.reactor.buffer(4096);
        buffer.copy_from_slice(&[value; 4096]);
        begin(&self.pair.reactor, async move { array.write(at, buffer.into()).await.is_ok() })
    }

    async fn all_die(&self, write: Begun<bool>) {
        self.pair.dies();
        self.steer.drop_waiting(&self.pair.reactor).await;
        assert!(!write.ended(&self.pair.reactor).await);
    }

    /// The stripe of the write agrees again: its second chunk can be told by the others.
    async fn is_made_to_agree(&mut self) {
        while self.pair.array.status().unsynced_stripes > 0 {
            self.pair.reactor.sleep(Duration::from_millis(1)).await;
        }
        self.pair.array.pull_member(self.idle).unwrap();
        assert_eq!(self.pair.read(CHUNK, 4096).await.unwrap(), [1; 4096]);
        self.pair.dies();
    }
}

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Steer) -> F) {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| test(reactor, steer));
}

/// Which starts that come after without this drive would not outnumber, did they count from the
/// newest that they see.
#[test]
fn a_map_that_two_starts_have_given_to_one_drive_says_nothing_later() {
    for deaths in [0, 1, 2, 5] {
        run(move |reactor, steer| async move {
            let mut six = Six::new(&reactor, steer, Policy::None).await;
            let idle = six.file(six.idle);
            for _ in 0..deaths {
                six.steer.set(move |file, op| match is_write(op) && file != idle {
                    true if superblock(op).is_none() => Fate::Waits,
                    _ => Fate::Passes,
                });
                six.start_that_dies().await;
            }
            six.starts_with(&six.but(six.idle)).await;
            let write = six.begins_a_write().await;
            six.all_die(write).await;
            six.starts_with(&six.drives.clone()).await;
            six.is_made_to_agree().await;
        });
    }
}

/// The dirty map's first page on a drive, in both of its places.
fn pages(six: &Six, member: MemberIndex) -> [u64; 2] {
    let area = label::plan(DRIVE_BYTES, 2).unwrap().dirty_map;
    [0, 1].map(|slot| {
        let mut bytes = vec![0; RegionMapPage::BYTES as usize];
        let at = area.offset + RegionMapPage::slot_offset(0, slot);
        six.pair.file(&six.drives[member.index()]).read_exact_at(&mut bytes, at).unwrap();
        RegionMapPage::ref_from_bytes(&bytes).unwrap().header.sequence.get()
    })
}

/// A crash has left the newest page of the map on one drive; the next start is torn where it puts
/// its own, and that drive is lost.
#[test]
fn the_map_before_the_newest_is_not_lost_before_all_have_that() {
    run(|reactor, steer| async move {
        let mut six = Six::new(&reactor, steer, Policy::Bitmap).await;
        six.starts_with(&six.drives.clone()).await;
        let write = six.begins_a_write().await;
        // One more region is marked, on one drive.
        let map = label::plan(DRIVE_BYTES, 2).unwrap().dirty_map;
        let last = six.file(six.parity[1]);
        six.steer.set(move |file, op| match offset(op) {
            Some(at) if is_write(op) && (file != last || !map.range().contains(&at)) => Fate::Waits,
            _ => Fate::Passes,
        });
        let other = six.write(six.pair.bytes.len() as u64 - 4096, 3);
        six.steer.caught(&reactor, 5).await;
        six.all_waits(&other).await;
        six.all_die(write).await;
        assert!(!other.ended(&reactor).await);
        let newest = pages(&six, six.parity[1]).into_iter().max().unwrap();
        let before = pages(&six, six.parity[0]).into_iter().max().unwrap();
        assert_eq!(newest, before + 1);
        // The slot of the one before is torn.
        let slot = map.offset + RegionMapPage::slot_offset(0, before);
        six.steer.set(move |_, op| match offset(op) {
            Some(at) if is_write(op) && at == slot => Fate::Waits,
            _ => Fate::Passes,
        });
        six.start_that_dies().await;
        for drive in &six.drives {
            six.pair.file(drive).write_all_at(&[0x77; 512], slot).unwrap();
        }
        six.starts_with(&six.but(six.parity[1])).await;
        assert!(six.pair.array.status().unsynced_stripes > 0);
        six.pair.dies();
    });
}

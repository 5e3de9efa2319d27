//! Goal: an array with checksums never returns what a drive made of a block: it finds bit rot, lost
//! and misdirected writes, says which drive lied, and mends it.
//! Method: arrays on RAM drives; blocks are changed behind the array's back through its own drives,
//! on every kind of position, healthy, degraded, rebuilt and after restarts.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::os::unix::fs::FileExt;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::array::Array;
use ashlar_raid::error::ArrayError;
use ashlar_raid::label;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::{ArrayState, Flaw, ScrubPlace, ScrubReport, ScrubState};
use ashlar_reactor::executor::Reactor;

use crate::pair::{DRIVE_BYTES, Pair, drive, fill, run, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

const BLOCK: usize = 4096;
/// Level and members; the last ones have more redundancy than one lie needs.
const KINDS: [(Level, usize); 5] = [
    (Level::Raid1, 2),
    (Level::Raid10, 4),
    (Level::Raid5, 4),
    (Level::Raid1, 3),
    (Level::Raid6, 5),
];

/// A block on a drive.
#[derive(Clone)]
struct Spot {
    drive: Rc<Drive>,
    member: usize,
    at: u64,
}

fn areas(pair: &Pair) -> MemberLayout {
    label::plan_for(DRIVE_BYTES, pair.array.layout().parity, true).unwrap()
}

/// The block at `row` of a position of a stripe.
fn spot(pair: &Pair, stripe: u64, position: u8, row: u32) -> Spot {
    let layout = pair.array.layout();
    let member = layout.member_at(StripeIndex(stripe), position).index();
    let drive = pair.array.status().members[member].drive.clone().unwrap();
    let at = areas(pair).data.offset + layout.member_offset(StripeIndex(stripe), row);
    Spot { drive, member, at }
}

impl Spot {
    async fn get(&self, reactor: &Reactor) -> Vec<u8> {
        label::read_bytes(reactor, &self.drive, self.at, BLOCK as u64).await.unwrap()
    }

    async fn put(&self, reactor: &Reactor, bytes: &[u8]) {
        let buffer = reactor.buffer(bytes.len());
        buffer.copy_from_slice(bytes);
        self.drive.write(self.at, buffer.into()).await.unwrap();
    }

    async fn rot(&self, reactor: &Reactor) -> Vec<u8> {
        let before = self.get(reactor).await;
        let mut after = before.clone();
        after[1234] ^= 0x20;
        self.put(reactor, &after).await;
        before
    }
}

/// Wrong blocks and wrong checksums, by member.
fn lies(pair: &Pair) -> Vec<(u64, u64)> {
    let lies = |drive: &Rc<Drive>| (drive.health().wrong_blocks, drive.health().wrong_checksums);
    pair.array.status().members.iter().map(|m| m.drive.as_ref().map_or((0, 0), lies)).collect()
}

/// Only this member lied, and so often.
fn assert_lied(pair: &Pair, member: usize, blocks: u64) {
    let mut expected = vec![(0, 0); pair.array.layout().members()];
    expected[member] = (blocks, 0);
    assert_eq!(lies(pair), expected);
}

/// The first two stripes are full of data that is in place.
async fn filled_pair(reactor: &Reactor, level: Level, members: usize) -> Pair {
    let mut pair = Pair::checked(reactor, level, members, 512).await;
    let len = 2 * pair.array.stripe_bytes() as usize;
    let bytes: Vec<u8> = (0..len).map(|at| (at / 512 * 7 + at % 13) as u8).collect();
    pair.put(0, &bytes).await;
    pair.in_place().await;
    pair
}

/// Copies are read in turn.
async fn read_every_copy(pair: &Pair, at: usize) {
    for _ in 0..pair.array.layout().members() {
        assert_eq!(pair.read(at, BLOCK).await.unwrap(), pair.bytes[at..at + BLOCK]);
    }
}

async fn scrub(pair: &Pair) -> ScrubReport {
    pair.array.start_scrub(false).unwrap();
    loop {
        pair.reactor.sleep(std::time::Duration::from_millis(1)).await;
        if let ScrubState::Finished { report } = pair.array.status().scrub {
            return report;
        }
    }
}

#[test]
fn arrays_with_checksums_serve_as_others_do() {
    run(|reactor| async move {
        for (level, members) in KINDS {
            for sector in [512, 4096] {
                let mut pair = Pair::checked(&reactor, level, members, sector).await;
                assert_eq!(pair.array.status().policy, Policy::Journal);
                pair.check().await;
                pair.write_some(80).await;
                pair.check().await;
                pair.scrub_is_clean().await;
                pair.restart(AssembleOptions::default()).await;
                assert!(pair.array.status().integrity);
                pair.check().await;
                pair.scrub_is_clean().await;
                pair.array.pull_member(MemberIndex(1)).unwrap();
                pair.write_some(40).await;
                pair.replace(1).await;
                pair.write_some(20).await;
                pair.rebuilt().await;
                pair.check().await;
                pair.restart(AssembleOptions::default()).await;
                pair.check().await;
                pair.scrub_is_clean().await;
                assert_eq!(pair.array.state(), ArrayState::Optimal);
                assert_eq!(lies(&pair), vec![(0, 0); members]);
                pair.array.stop().await.unwrap();
            }
        }
    });
}

#[test]
fn rot_is_found_named_and_mended() {
    run(|reactor| async move {
        for (level, members) in KINDS {
            for restart in [false, true] {
                let mut pair = filled_pair(&reactor, level, members).await;
                if restart {
                    pair.restart(AssembleOptions::default()).await;
                }
                let spot = spot(&pair, 1, 0, 8192);
                let before = spot.rot(&reactor).await;
                read_every_copy(&pair, pair.array.stripe_bytes() as usize + 8192).await;
                assert_lied(&pair, spot.member, 1);
                assert_eq!(spot.get(&reactor).await, before);
                assert_eq!(pair.array.status().counters.repaired, 1);
                pair.array.stop().await.unwrap();
            }
        }
    });
}

#[test]
fn lies_in_parity_and_copies_are_found_by_a_scrub() {
    run(|reactor| async move {
        for (level, members) in KINDS {
            let mut pair = filled_pair(&reactor, level, members).await;
            let last = pair.array.layout().positions() - 1;
            let spot = spot(&pair, 0, last, 4096);
            let before = spot.rot(&reactor).await;
            assert_eq!(scrub(&pair).await.mismatched_stripes, 0);
            assert_lied(&pair, spot.member, 1);
            assert_eq!(spot.get(&reactor).await, before);
            pair.check().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// A flaw of one block of a position, as a scrub tells it.
fn place(pair: &Pair, stripe: u64, position: u8, row: u32, flaw: Flaw) -> ScrubPlace {
    let layout = pair.array.layout();
    let member = Some(layout.member_at(StripeIndex(stripe), position));
    let first = stripe * layout.stripe_bytes();
    let chunk = u64::from(position / layout.copies) * u64::from(layout.chunk_bytes);
    let (offset, len) = if position < layout.data * layout.copies {
        (first + chunk + u64::from(row), BLOCK as u64)
    } else {
        (first, layout.stripe_bytes())
    };
    ScrubPlace { stripe, offset, len, member, flaw, repaired: true }
}

/// What is mended by its checksum on the way is no less found by the scrub; what was mended before,
/// by a read, is not its finding.
#[test]
fn a_scrub_tells_what_it_mends_by_checksums() {
    run(|reactor| async move {
        for (level, members) in KINDS {
            let mut pair = filled_pair(&reactor, level, members).await;
            spot(&pair, 0, 0, 0).rot(&reactor).await;
            read_every_copy(&pair, 0).await;
            let last = pair.array.layout().positions() - 1;
            for (stripe, position, row) in [(0, last, 4096), (0, last, 8192), (1, 0, 0)] {
                spot(&pair, stripe, position, row).rot(&reactor).await;
            }
            let report = scrub(&pair).await;
            let mut two = place(&pair, 0, last, 4096, Flaw::Block);
            if pair.array.layout().is_mirrored() {
                two.len += BLOCK as u64;
            }
            let places = vec![two, place(&pair, 1, 0, 0, Flaw::Block)];
            let mut wrong = std::collections::BTreeMap::new();
            places.iter().for_each(|its| *wrong.entry(its.member.unwrap()).or_default() += 1);
            let expected = ScrubReport {
                began_s: report.began_s,
                ended_s: report.ended_s,
                damaged_stripes: 2,
                repaired_stripes: 2,
                places,
                wrong_by_member: wrong,
                ..ScrubReport::default()
            };
            assert_eq!(report, expected, "{level:?}");
            pair.restart(AssembleOptions::default()).await;
            let ScrubState::Finished { report: kept } = pair.array.status().scrub else { panic!() };
            assert_eq!(kept, expected, "{level:?}: as after a restart");
            let clean = scrub(&pair).await;
            assert_eq!((clean.damaged_stripes, clean.places), (0, vec![]), "{level:?}");
            pair.check().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// Where nobody knows what stood there, a scrub says where that is, and whose block does not fit.
#[test]
fn a_scrub_tells_where_it_is_lost() {
    run(|reactor| async move {
        for (level, members, liars) in [(Level::Raid5, 4, 2), (Level::Raid6, 5, 3)] {
            let mut pair = filled_pair(&reactor, level, members).await;
            for position in 0..liars {
                spot(&pair, 1, position, 8192).rot(&reactor).await;
            }
            let lost = |position: u8| {
                let place = place(&pair, 1, position, 8192, Flaw::Block);
                ScrubPlace { repaired: false, ..place }
            };
            let places: Vec<ScrubPlace> = (0..liars).map(lost).collect();
            let report = scrub(&pair).await;
            assert_eq!((report.unreadable_stripes, &report.places), (1, &places), "{level:?}");
            assert_eq!((report.damaged_stripes, report.repaired_stripes), (0, 0));
            assert_eq!(report.wrong_by_member.len(), usize::from(liars));
            pair.restart(AssembleOptions::default()).await;
            assert_eq!(pair.array.status().scrub.report(), Some(&report));
            // As the report says: written again, all is well.
            for its in places.iter().filter(|its| its.len == BLOCK as u64) {
                pair.put(its.offset as usize, &[7; BLOCK]).await;
            }
            pair.in_place().await;
            pair.scrub_is_clean().await;
            pair.check().await;
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn lost_and_misdirected_writes() {
    run(|reactor| async move {
        for (level, members) in KINDS {
            for misdirected in [false, true] {
                let mut pair = filled_pair(&reactor, level, members).await;
                let lost = spot(&pair, 0, 0, 4096);
                let old = lost.get(&reactor).await;
                pair.put(4096, &[77; BLOCK]).await;
                pair.in_place().await;
                assert_eq!(lost.get(&reactor).await, [77; BLOCK]);
                lost.put(&reactor, &old).await;
                let mut wrong = 1;
                if misdirected {
                    // It went where the same member has a block of the next stripe.
                    let at = lost.at + u64::from(pair.array.layout().chunk_bytes);
                    Spot { at, ..lost.clone() }.put(&reactor, &[77; BLOCK]).await;
                    wrong += 1;
                }
                pair.restart(AssembleOptions::default()).await;
                assert_eq!(scrub(&pair).await.mismatched_stripes, 0);
                assert_lied(&pair, lost.member, wrong);
                pair.check().await;
                pair.array.stop().await.unwrap();
            }
        }
    });
}

#[test]
fn several_members_may_lie_in_different_rows() {
    run(|reactor| async move {
        let mut pair = filled_pair(&reactor, Level::Raid5, 4).await;
        for (position, row) in [(0, 0), (1, 4096), (2, 8192), (3, 12288)] {
            spot(&pair, 0, position, row).rot(&reactor).await;
        }
        pair.check().await;
        assert_eq!(scrub(&pair).await.unreadable_stripes, 0);
        assert_eq!(lies(&pair), vec![(1, 0); 4]);
        pair.array.stop().await.unwrap();
    });
}

/// A small write reads old data and old parity: what is wrong there must not become parity.
#[test]
fn a_small_write_takes_nothing_wrong_over() {
    run(|reactor| async move {
        for (level, members) in [(Level::Raid5, 5), (Level::Raid6, 6)] {
            for position in 0..members as u8 {
                let mut pair = filled_pair(&reactor, level, members).await;
                spot(&pair, 0, position, 4096).rot(&reactor).await;
                pair.put(4096, &[78; BLOCK]).await;
                pair.in_place().await;
                pair.check().await;
                pair.scrub_is_clean().await;
                pair.array.pull_member(MemberIndex(2)).unwrap();
                pair.check().await;
                pair.array.stop().await.unwrap();
            }
        }
    });
}

/// Sums of new parity are in the journal, and nothing is in place. What the data that is to be
/// replaced was before may be needed: where that is wrong, nothing may be made of it.
#[test]
fn a_start_after_a_crash_takes_nothing_wrong_over() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let pairs = (0..5).flat_map(|first| (first + 1..5).map(move |second| [first, second]));
        for wrong in pairs {
            let mut pair = filled_pair(&reactor, Level::Raid6, 5).await;
            let drives = pair.drives();
            let at = spot(&pair, 0, 0, 0).at;
            steer.set(move |_, op| match offset(op) {
                Some(its) if its == at && is_write(op) => Fate::Waits,
                _ => Fate::Passes,
            });
            pair.put(0, &[79; BLOCK]).await;
            let array = pair.array.clone();
            reactor.spawn(async move {
                let _ = array.destage_all().await;
            });
            // Both parity chunks.
            steer.caught(&reactor, 2).await;
            for position in wrong {
                let file = pair.file(&spot(&pair, 0, position, 0).drive);
                file.write_all_at(&[0x5a; 512], at).unwrap();
            }
            pair.dies();
            steer.drop_waiting(&reactor).await;
            pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
            pair.check().await;
            assert_eq!(scrub(&pair).await.unreadable_stripes, 0);
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn what_cannot_be_mended_is_an_error() {
    run(|reactor| async move {
        let mut pair = filled_pair(&reactor, Level::Raid6, 5).await;
        let first = spot(&pair, 0, 0, 0);
        for position in 1..3 {
            let member = pair.array.layout().member_at(StripeIndex(0), position);
            let before = first.rot(&reactor).await;
            if position == 1 {
                pair.array.pull_member(member).unwrap();
                pair.check().await;
                assert_eq!(first.get(&reactor).await, before, "one may lie, one may be away");
                assert_eq!(first.drive.health().wrong_blocks, 1);
                continue;
            }
            pair.array.pull_member(member).unwrap();
            assert_eq!(pair.read(0, BLOCK).await, Err(ArrayError::Lost));
            assert_eq!(pair.read(512, 512).await, Err(ArrayError::Lost));
            assert_eq!(pair.read(BLOCK, BLOCK).await.unwrap(), pair.bytes[BLOCK..2 * BLOCK]);
        }
        // Written anew, it is known again.
        pair.put(0, &[1; BLOCK]).await;
        assert_eq!(pair.read(0, BLOCK).await.unwrap(), [1; BLOCK]);
    });
}

#[test]
fn a_damaged_checksum_is_told_from_a_damaged_block() {
    run(|reactor| async move {
        for (level, members) in KINDS {
            let mut pair = filled_pair(&reactor, level, members).await;
            let block = spot(&pair, 0, 0, 0);
            let sums = Spot { at: areas(&pair).integrity.offset, ..block.clone() };
            let members_before = pair.array.status().members;
            pair.array.stop().await.unwrap();
            // One of the sectors: the others are known still. The first block is wrong, too.
            let mut page = sums.get(&reactor).await;
            page[300] ^= 1;
            sums.put(&reactor, &page).await;
            let before = block.rot(&reactor).await;
            let drives = members_before.into_iter().filter_map(|m| m.drive).collect();
            let options = AssembleOptions::default();
            pair.array = Array::assemble(&reactor, drives, options).await.unwrap();
            let report = scrub(&pair).await;
            assert_eq!(report.unreadable_stripes, 0);
            assert!(report.damaged_stripes > 1, "{report:?}");
            assert_eq!(report.damaged_stripes, report.repaired_stripes);
            let told = |flaw| report.places.iter().any(|its| its.flaw == flaw && its.repaired);
            assert!(told(Flaw::Block) && told(Flaw::Checksum), "{report:?}");
            pair.check().await;
            let (blocks, checksums) = lies(&pair)[block.member];
            assert!(blocks == 1 && checksums > 10, "{blocks} {checksums}");
            assert_eq!(block.get(&reactor).await, before);
            // They are set again, durably.
            pair.restart(AssembleOptions::default()).await;
            assert_eq!(scrub(&pair).await.unreadable_stripes, 0);
            assert_eq!(lies(&pair)[block.member], (blocks, checksums));
            pair.array.stop().await.unwrap();
        }
    });
}

/// Two wrongs of one drive: a block that it cannot read, and a page of checksums that it has not
/// written.
#[test]
fn an_old_checksum_of_an_unreadable_block_is_outvoted() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        for another_is_away in [false, true] {
            let mut pair = filled_pair(&reactor, Level::Raid6, 5).await;
            pair.restart(AssembleOptions::default()).await;
            let block = spot(&pair, 0, 0, 0);
            let sums = Spot { at: areas(&pair).integrity.offset, ..block.clone() };
            let old = sums.get(&reactor).await;
            pair.put(0, &[9; BLOCK]).await;
            let drives: Vec<Rc<Drive>> =
                pair.array.status().members.into_iter().filter_map(|m| m.drive).collect();
            pair.array.stop().await.unwrap();
            assert_ne!(sums.get(&reactor).await, old);
            sums.put(&reactor, &old).await;
            let options = AssembleOptions::default();
            pair.array = Array::assemble(&reactor, drives, options).await.unwrap();
            if another_is_away {
                let other = pair.array.layout().member_at(StripeIndex(0), 1);
                pair.array.pull_member(other).unwrap();
            }
            let (file, at) = (address(pair.file(&block.drive)), block.at);
            steer.set(move |its, op| match offset(op) {
                Some(its_at) if its == file && its_at == at && !is_write(op) => Fate::Fails,
                _ => Fate::Passes,
            });
            let read = pair.read(0, BLOCK).await;
            steer.set(|_, _| Fate::Passes);
            if another_is_away {
                // Either it is the checksum that is old, or what the three others have.
                assert_eq!(read, Err(ArrayError::Lost));
                continue;
            }
            assert_eq!(read.unwrap(), [9; BLOCK]);
            assert_eq!(lies(&pair)[block.member], (0, 1));
            pair.check().await;
            assert_eq!(block.get(&reactor).await, [9; BLOCK], "it was written again");
            assert_eq!(lies(&pair)[block.member], (0, 1), "and its checksum is known");
            assert_eq!(scrub(&pair).await.unreadable_stripes, 0);
        }
    });
}

#[test]
fn a_page_of_checksums_at_another_place_is_not_believed() {
    run(|reactor| async move {
        let mut pair = filled_pair(&reactor, Level::Raid5, 4).await;
        let block = spot(&pair, 0, 0, 0);
        let sums = Spot { at: areas(&pair).integrity.offset, ..block.clone() };
        let page = sums.get(&reactor).await;
        let other = pair.array.status().members[(block.member + 1) % 4].drive.clone().unwrap();
        let members = pair.array.status().members;
        pair.array.stop().await.unwrap();
        // That of another drive, which fits its bytes: all of it counts as lost.
        let its = Spot { drive: other, ..sums.clone() }.get(&reactor).await;
        assert_ne!(its, page);
        sums.put(&reactor, &its).await;
        let drives = members.into_iter().filter_map(|m| m.drive).collect();
        pair.array = Array::assemble(&reactor, drives, AssembleOptions::default()).await.unwrap();
        pair.check().await;
        let (blocks, checksums) = lies(&pair)[block.member];
        assert!(blocks == 0 && checksums > 0, "{blocks} {checksums}");
        pair.array.stop().await.unwrap();
    });
}

#[test]
fn a_rebuilt_member_has_checksums() {
    run(|reactor| async move {
        for (level, members) in KINDS {
            let mut pair = filled_pair(&reactor, level, members).await;
            let first = pair.array.layout().member_at(StripeIndex(0), 0);
            pair.array.pull_member(first).unwrap();
            pair.replace(first.0).await;
            pair.rebuilt().await;
            pair.restart(AssembleOptions::default()).await;
            let spot = spot(&pair, 0, 0, 0);
            let before = spot.rot(&reactor).await;
            read_every_copy(&pair, 0).await;
            assert_lied(&pair, spot.member, 1);
            assert_eq!(spot.get(&reactor).await, before);
            pair.array.stop().await.unwrap();
        }
    });
}

/// All is moved, most of it to other members. Wherever it is now it is verified, and nowhere by
/// what stood there before.
#[test]
fn what_was_moved_over_more_members_has_checksums() {
    run(|reactor| async move {
        for (level, members, more) in [(Level::Raid5, 4, 1), (Level::Raid6, 5, 2)] {
            let mut pair = filled_pair(&reactor, level, members).await;
            let mut new = Vec::new();
            for index in 0..more {
                let drive = drive(&reactor, "new", 512);
                fill(&reactor, &drive).await;
                new.push(([100 + index; 16], drive));
            }
            pair.array.add_members(new).await.unwrap();
            pair.write_some(30).await;
            while pair.array.status().restripe.is_some() {
                pair.reactor.sleep(std::time::Duration::from_millis(1)).await;
            }
            pair.in_place().await;
            pair.restart(AssembleOptions::default()).await;
            pair.check().await;
            // Each position of a stripe is on another member, added ones among them.
            let positions = pair.array.layout().positions();
            let mut spots = Vec::new();
            for position in 0..positions {
                let spot = spot(&pair, 1, position, 8192);
                let before = spot.rot(&reactor).await;
                assert_eq!(scrub(&pair).await.unreadable_stripes, 0);
                assert_eq!(spot.get(&reactor).await, before);
                spots.push(spot.member);
            }
            spots.sort_unstable();
            assert_eq!(spots, (0..positions.into()).collect::<Vec<_>>());
            assert_eq!(lies(&pair), vec![(1, 0); spots.len()]);
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn checksums_need_redundancy_and_the_journal() {
    run(|reactor| async move {
        let make = |level: Level, policy, members: u8| {
            let spec = ArraySpec { integrity: true, policy, ..Pair::spec(level) };
            let drives = (0..members).map(|i| ([i; 16], drive(&reactor, "d", 512))).collect();
            let reactor = reactor.clone();
            async move { Array::create(&reactor, &spec, drives).await }
        };
        assert!(make(Level::Raid0, None, 2).await.is_err());
        assert!(make(Level::Raid5, Some(Policy::Bitmap), 3).await.is_err());
        let array = make(Level::Raid1, None, 2).await.unwrap();
        for policy in [Policy::Bitmap, Policy::None] {
            let refused = array.set_policy(policy).await.unwrap_err().to_string();
            assert!(refused.contains("--integrity"), "{refused}");
        }
        assert_eq!(array.policy(), Policy::Journal);
        array.stop().await.unwrap();
    });
}

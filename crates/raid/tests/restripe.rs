//! Goal: while members are added, a member may be lost, others rebuilt, and the array stopped or
//! killed: it goes on from where it was, and no data is lost.
//! Method: modelled drives under a clock that jumps; every block is read in the end, and scrubbed.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, AssembleError, ChangeError};
use ashlar_raid::label;
use ashlar_raid::layout::Layout;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::{ArrayState, Progress, ScrubState};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::DeviceId;

use crate::modelled::{
    DRIVE_BYTES, LATENCY, Unreadable, drive, full_array, plug_in, run, run_counted, run_full,
    run_unreadable,
};

/// Level, members, and how many are added.
const SHAPES: [(Level, usize, usize); 3] =
    [(Level::Raid5, 3, 1), (Level::Raid6, 4, 2), (Level::Raid10, 4, 2)];

/// No restripe takes longer.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// An array that is full of one value, but for what was written later.
struct Subject {
    reactor: Reactor,
    array: Rc<Array>,
    full: u64,
    written: Vec<(Range<u64>, u8)>,
}

impl Subject {
    /// Members are being added, and a part of all has its new place.
    async fn restriping(
        reactor: &Reactor,
        (level, members, more): (Level, usize, usize),
    ) -> Subject {
        let share = SettingsChange { rebuild_percent: Some(1), ..SettingsChange::default() };
        let array = full_array(reactor, (level, members), share, |_| LATENCY).await;
        let full = array.capacity();
        let added = (members..members + more)
            .map(|index| ([index as u8; 16], drive(reactor, &format!("d{index}"), LATENCY)));
        array.add_members(added.collect()).await.unwrap();
        let mut subject = Subject { reactor: reactor.clone(), array, full, written: Vec::new() };
        subject.moves_to(1, 3).await;
        subject.write_some().await;
        subject
    }

    fn restripe(&self) -> Option<Progress> {
        self.array.status().restripe
    }

    /// How many stripes have their new shape.
    fn moved(&self) -> u64 {
        self.restripe().expect("it is under way").stripes_done
    }

    async fn moves_to(&self, part: u64, of: u64) {
        while self.restripe().expect("it is under way").stripes_total * part / of > self.moved() {
            self.reactor.sleep(Duration::from_millis(100)).await;
        }
    }

    /// In front of what was moved, and behind it.
    async fn write_some(&mut self) {
        let value = 10 + self.written.len() as u8;
        for at in [1 << 20, self.full / 3, self.full - (1 << 20)] {
            let at = (at + (u64::from(value) << 12)) / 4096 * 4096;
            let bytes = self.reactor.buffer(20 << 10);
            bytes.copy_from_slice(&[value; 20 << 10]);
            self.array.write(at, bytes.into()).await.unwrap();
            self.written.push((at..at + (20 << 10), value));
        }
    }

    async fn check(&self) {
        let step = 1 << 20;
        for at in (0..self.array.capacity()).step_by(step) {
            let len = (self.array.capacity() - at).min(step as u64) as usize;
            let mut right = vec![0; len];
            let full = self.full.saturating_sub(at).min(len as u64) as usize;
            right[..full].fill(7);
            for (range, value) in &self.written {
                let (start, end) = (range.start.max(at), range.end.min(at + len as u64));
                if start < end {
                    right[(start - at) as usize..(end - at) as usize].fill(*value);
                }
            }
            let into = self.reactor.buffer(len);
            self.array.read(at, into.clone().into()).await.unwrap();
            assert!(into.bytes() == &right[..], "wrong data from {at} on");
        }
    }

    /// Everything is moved, in the end.
    async fn ends(&self) {
        let began = self.reactor.now();
        while self.restripe().is_some() {
            let took = self.reactor.now().since(began);
            assert!(took < LONGEST, "{:?}", self.array.status().restripe_error);
            self.reactor.sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(self.array.status().restripe_error, None);
        assert!(self.array.capacity() > self.full, "there is no more room than before");
        self.check().await;
    }

    async fn replace(&self, index: u8) {
        let new = drive(&self.reactor, "new", LATENCY);
        self.array.replace_member(MemberIndex(index), new, [100 + index; 16]).await.unwrap();
    }

    /// A member is replaced while a stripe cannot be read on another.
    async fn rebuilt_beside(&self, unreadable: &Unreadable, stripe: u64) {
        self.rebuilt_without(unreadable, (0, 1), stripe).await;
    }

    /// The same; `with`: the other member, and the one that is replaced.
    async fn rebuilt_without(&self, unreadable: &Unreadable, with: (u8, u8), stripe: u64) {
        let data = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
        let at = data + stripe * u64::from(self.array.layout().chunk_bytes);
        unreadable.set(Some((DeviceId(with.0.into()), at)));
        self.array.pull_member(MemberIndex(with.1)).unwrap();
        self.replace(with.1).await;
        assert!(self.moved() < stripe, "it was moved meanwhile");
        while self.array.status().rebuild.is_some() {
            self.reactor.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(self.array.state(), ArrayState::Optimal);
    }

    async fn is_whole(&self) {
        while self.array.status().rebuild.is_some() {
            self.reactor.sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(self.array.state(), ArrayState::Optimal);
        self.check().await;
        self.array.start_scrub(false).unwrap();
        loop {
            self.reactor.sleep(Duration::from_millis(100)).await;
            if let ScrubState::Finished { report } = self.array.status().scrub {
                let wrong = (report.mismatched_stripes, report.unreadable_stripes);
                assert_eq!(wrong, (0, 0));
                break;
            }
        }
        self.array.stop().await.unwrap();
    }
}

#[test]
fn it_goes_on_without_a_member() {
    for shape in SHAPES {
        // One that was there, and one that was added.
        for lost in [0, shape.1 as u8] {
            run(|reactor| async move {
                let mut subject = Subject::restriping(&reactor, shape).await;
                subject.array.pull_member(MemberIndex(lost)).unwrap();
                subject.write_some().await;
                let before = subject.moved();
                subject.moves_to(2, 3).await;
                assert!(subject.moved() > before);
                assert_eq!(subject.array.state(), ArrayState::Degraded);
                subject.check().await;
                subject.ends().await;
                assert_eq!(subject.array.state(), ArrayState::Degraded);
                subject.replace(lost).await;
                subject.is_whole().await;
            });
        }
    }
}

#[test]
fn it_waits_while_a_member_is_rebuilt() {
    for shape in SHAPES {
        run(|reactor| async move {
            let mut subject = Subject::restriping(&reactor, shape).await;
            subject.array.pull_member(MemberIndex(1)).unwrap();
            subject.write_some().await;
            subject.replace(1).await;
            // A window may have been under way.
            reactor.sleep(Duration::from_secs(3)).await;
            let before = subject.moved();
            let mut looks = 0;
            while subject.array.status().rebuild.is_some() {
                assert_eq!(subject.moved(), before, "both at a time");
                reactor.sleep(Duration::from_millis(100)).await;
                looks += 1;
            }
            assert!(looks > 50, "the rebuild was over after {looks} looks");
            assert_eq!(subject.array.state(), ArrayState::Optimal);
            subject.ends().await;
            subject.is_whole().await;
        });
    }
}

#[test]
fn it_goes_on_from_where_it_was() {
    for shape in SHAPES {
        for by_force in [false, true] {
            run(|reactor| async move {
                let mut subject = Subject::restriping(&reactor, shape).await;
                subject.moves_to(1, 2).await;
                subject.write_some().await;
                let before = subject.moved();
                if by_force {
                    let members = subject.array.status().members;
                    members.iter().flat_map(|its| &its.drive).for_each(|drive| drive.pull());
                } else {
                    subject.array.stop().await.unwrap();
                }
                // What is under way on them ends, and is heard by nobody.
                reactor.sleep(Duration::from_secs(1)).await;
                let count = (shape.1 + shape.2) as u32;
                let drives = (0..count).map(|number| plug_in(&reactor, number)).collect();
                let options = AssembleOptions::default();
                subject.array = Array::assemble(&reactor, drives, options).await.unwrap();
                // A window is at most 2 MiB, and durable before the next one is begun.
                let window = (2 << 20) / subject.array.stripe_bytes() + 1;
                let after = subject.moved();
                assert!(after.abs_diff(before) <= window, "{after}, {before}");
                subject.check().await;
                subject.ends().await;
                subject.is_whole().await;
            });
        }
    }
}

/// A window is half-way, and there is no space to put it in place: that is no reason to give a
/// drive up, however long it takes.
#[test]
fn it_waits_until_there_is_space_again() {
    for shape in SHAPES {
        run_full(|reactor, full| async move {
            let mut subject = Subject::restriping(&reactor, shape).await;
            subject.array.destage_all().await.unwrap();
            full.set(Some(label::plan(DRIVE_BYTES, 1).unwrap().data.offset));
            while subject.array.status().restripe_error.is_none() {
                reactor.sleep(Duration::from_millis(100)).await;
            }
            let stands = subject.moved();
            reactor.sleep(Duration::from_secs(300)).await;
            let status = subject.array.status();
            assert_eq!(status.restripe_error.unwrap(), ArrayError::NoSpace.to_string());
            assert_eq!((status.state, subject.moved()), (ArrayState::Optimal, stands));
            full.set(None);
            subject.write_some().await;
            subject.ends().await;
            subject.is_whole().await;
        });
    }
}

#[test]
fn it_does_not_begin_without_a_member() {
    for (level, members, more) in SHAPES {
        run(|reactor| async move {
            let usual = SettingsChange::default();
            let array = full_array(&reactor, (level, members), usual, |_| LATENCY).await;
            array.pull_member(MemberIndex(1)).unwrap();
            let added = || {
                let new = |index| ([index as u8; 16], drive(&reactor, "new", LATENCY));
                (members..members + more).map(new).collect()
            };
            for written in [false, true] {
                let refused = array.add_members(added()).await;
                assert_eq!(refused, Err(ChangeError::NotOptimal), "written: {written}");
                array.write(0, reactor.buffer(4096).into()).await.unwrap();
            }
            assert_eq!(array.status().members.len(), members);
            assert!(array.status().restripe.is_none());
            array.stop().await.unwrap();
        });
    }
}

#[test]
fn nothing_is_lost_with_what_was_moved_away() {
    run_unreadable(|reactor, unreadable| async move {
        let subject = Subject::restriping(&reactor, SHAPES[0]).await;
        subject.moves_to(1, 2).await;
        // Two data chunks became three: from the cursor to one and a half of it.
        let dead = subject.moved() + subject.moved() / 3;
        subject.rebuilt_beside(&unreadable, dead).await;
        assert!(unreadable.get().is_some(), "it was read");
        assert_eq!(subject.array.status().bad.len(), 0);
        subject.ends().await;
        subject.is_whole().await;
    });
}

#[test]
fn what_is_lost_and_discarded_is_not_in_its_way() {
    run_unreadable(|reactor, unreadable| async move {
        let mut subject = Subject::restriping(&reactor, SHAPES[0]).await;
        let live = 2 * subject.moved();
        subject.rebuilt_beside(&unreadable, live).await;
        assert!(!subject.array.status().bad.is_empty());
        while subject.array.status().restripe_error.is_none() {
            reactor.sleep(Duration::from_millis(100)).await;
        }
        // Part of it belongs to another.
        let stripe = 2 * u64::from(subject.array.layout().chunk_bytes);
        let range = live * stripe - (8 << 10)..live * stripe + stripe;
        subject.array.discard(range.start, range.end - range.start).await.unwrap();
        subject.array.destage_all().await.unwrap();
        assert_eq!(subject.array.status().bad.len(), 0);
        subject.written.push((range, 0));
        subject.ends().await;
        subject.is_whole().await;
    });
}

/// Nobody else has it, and nobody has given it up.
#[test]
fn what_cannot_be_read_and_is_discarded_is_not_in_its_way() {
    run_unreadable(|reactor, unreadable| async move {
        let mut subject = Subject::restriping(&reactor, (Level::Raid0, 2, 1)).await;
        let chunk = u64::from(subject.array.layout().chunk_bytes);
        let data = label::plan(DRIVE_BYTES, 0).unwrap().data.offset;
        let stripe = 2 * subject.moved();
        unreadable.set(Some((DeviceId(0), data + stripe * chunk)));
        while subject.array.status().restripe_error.is_none() {
            reactor.sleep(Duration::from_millis(100)).await;
        }
        let at = 2 * stripe * chunk;
        subject.array.discard(at, chunk).await.unwrap();
        subject.written.push((at..at + chunk, 0));
        subject.ends().await;
        subject.array.stop().await.unwrap();
    });
}

/// Of the stripe at the end of what was moved a part is not read there any more, either.
#[test]
fn nothing_is_lost_with_the_part_of_a_stripe_that_was_moved_away() {
    run_unreadable(|reactor, unreadable| async move {
        let subject = Subject::restriping(&reactor, (Level::Raid5, 4, 1)).await;
        // Three data chunks became four.
        let is_cut = |moved: u64| !(4 * moved).is_multiple_of(3);
        let (mut before, mut moved) = (0, subject.moved());
        // And it rests.
        while !is_cut(moved) || moved != before {
            reactor.sleep(Duration::from_millis(100)).await;
            (before, moved) = (moved, subject.moved());
        }
        let old = Layout { data: 3, ..subject.array.layout() };
        let border = StripeIndex(4 * moved / 3);
        let with = (old.member_at(border, 0).0, old.member_at(border, 3).0);
        subject.rebuilt_without(&unreadable, with, border.0).await;
        assert_eq!(subject.moved(), moved);
        assert!(unreadable.get().is_none(), "it was not given up");
        assert_eq!(subject.array.status().bad.len(), 0);
        subject.ends().await;
        subject.is_whole().await;
    });
}

/// What was moved may be in the journal only, of which too little is left.
#[test]
fn too_few_members_do_not_start_by_force_meanwhile() {
    for (level, members, lost) in [(Level::Raid0, 2, vec![2]), (Level::Raid10, 4, vec![4, 5])] {
        for clean in [true, false] {
            let lost = lost.clone();
            run(|reactor| async move {
                let more = lost.len();
                let subject = Subject::restriping(&reactor, (level, members, more)).await;
                if clean {
                    subject.array.stop().await.unwrap();
                } else {
                    let members = subject.array.status().members;
                    members.iter().flat_map(|its| &its.drive).for_each(|drive| drive.pull());
                }
                reactor.sleep(Duration::from_secs(1)).await;
                let left = (0..(members + more) as u32).filter(|index| !lost.contains(index));
                let left: Vec<_> = left.map(|index| plug_in(&reactor, index)).collect();
                let options = AssembleOptions { force: true, ..AssembleOptions::default() };
                let refused = Array::assemble(&reactor, left.clone(), options).await.err();
                assert!(matches!(refused, Some(AssembleError::TooFew { .. })), "{refused:?}");
                let written: u64 = left.iter().map(|drive| drive.counters().write_bytes).sum();
                assert_eq!(written, 0, "{level:?}");
            });
        }
    }
}

/// A volume that is made of what nobody wrote costs no writes.
#[test]
fn zeroes_where_nothing_is_are_not_written() {
    for (level, members, more) in SHAPES {
        run(|reactor| async move {
            let share = SettingsChange { rebuild_percent: Some(1), ..SettingsChange::default() };
            let array = full_array(&reactor, (level, members), share, |_| LATENCY).await;
            let full = array.capacity();
            let half = full / 2..full;
            array.discard(half.start, half.end - half.start).await.unwrap();
            let added = (members..members + more)
                .map(|index| ([index as u8; 16], drive(&reactor, &format!("d{index}"), LATENCY)));
            array.add_members(added.collect()).await.unwrap();
            let mut written = vec![(half.clone(), 0)];
            // A whole region at least was given back, and some of it is used again.
            let used = full - (8 << 20)..full - (7 << 20);
            array.write_zeroes(half.start, half.end - half.start).await.unwrap();
            array.destage_all().await.unwrap();
            let bytes = |array: &Array| {
                let members = array.status().members.into_iter();
                members.map(|its| its.drive.unwrap().counters().write_bytes).sum::<u64>()
            };
            let before = bytes(&array);
            array.write_zeroes(half.start, half.end - half.start).await.unwrap();
            let took = bytes(&array) - before;
            assert!(took < (half.end - half.start) / 4, "{level:?}: {took} bytes");
            let sevens = reactor.buffer(1 << 20);
            sevens.copy_from_slice(&[9; 1 << 20]);
            array.write(used.start, sevens.into()).await.unwrap();
            array.write_zeroes(used.start + 4096, 8192).await.unwrap();
            written.push((used.clone(), 9));
            written.push((used.start + 4096..used.start + 12288, 0));
            let subject = Subject { reactor: reactor.clone(), array, full, written };
            subject.ends().await;
            subject.is_whole().await;
        });
    }
}

/// Then the journal has nothing of it any more, though nobody has written since.
#[test]
fn too_few_members_start_by_force_once_all_is_moved() {
    for (level, members, lost) in [(Level::Raid0, 2, vec![2]), (Level::Raid10, 4, vec![4, 5])] {
        run(|reactor| async move {
            let more = lost.len();
            let subject = Subject::restriping(&reactor, (level, members, more)).await;
            subject.ends().await;
            subject.array.stop().await.unwrap();
            let left = (0..(members + more) as u32).filter(|index| !lost.contains(index));
            let left = left.map(|index| plug_in(&reactor, index)).collect();
            let options = AssembleOptions { force: true, ..AssembleOptions::default() };
            let array = Array::assemble(&reactor, left, options).await.unwrap();
            assert_eq!(array.state(), ArrayState::Failed, "{level:?}");
            let _ = array.stop().await;
        });
    }
}

/// When all is moved the array goes back to how it writes otherwise: a stop waits for that.
#[test]
fn nothing_is_written_after_a_stop_at_its_end() {
    for moment in 5..13 {
        run_counted(|reactor, busiest| async move {
            let subject = Subject::restriping(&reactor, SHAPES[0]).await;
            let array = &subject.array;
            array.set_policy(Policy::Bitmap).await.unwrap();
            let all = SettingsChange { rebuild_percent: Some(100), ..SettingsChange::default() };
            array.set_settings(all).await.unwrap();
            while array.capacity() == subject.full {
                reactor.sleep(Duration::from_micros(10)).await;
            }
            reactor.sleep(moment * LATENCY / 4).await;
            // It ends at once, if nobody has to be waited for.
            (1..4).for_each(|index| array.pull_member(MemberIndex(index)).unwrap());
            let _ = array.stop().await;
            busiest.set(0);
            reactor.sleep(Duration::from_secs(1)).await;
            assert_eq!(busiest.get(), 0, "{moment}");
        });
    }
}

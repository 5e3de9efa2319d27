//! Goal: whatever subsets of its drives an array is started with, also by force, and wherever such
//! starts die: without force nothing acknowledged is lost or overwritten, and no drive that has
//! what the others lack becomes one of them.
//! Method: random steps (`ASHLAR_FIRST` and `ASHLAR_ROUNDS`: from which seed, and how many), and a
//! tree of what was acknowledged: each drive is known to have had one of its nodes, and so all from
//! there to the root.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::{AssembleError, ChangeError};
use ashlar_raid::layout::Shape;
use ashlar_raid::start::{ArraySpec, AssembleOptions, Known};
use ashlar_raid::status::MemberStatus;
use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::prng::Prng;

use crate::pair::{DRIVE_BYTES, Pair, begin, run_on};
use crate::steered::{Fate, Steer, address, superblock};

const ROUNDS: u64 = 60;
const STEPS: u32 = 40;

#[test]
fn nothing_acknowledged_is_left_behind_silently() {
    let mut seen = Seen::default();
    let told = |name: &str, usual| std::env::var(name).map_or(usual, |told| told.parse().unwrap());
    let first = told("ASHLAR_FIRST", 0);
    for seed in first..first + told("ASHLAR_ROUNDS", ROUNDS) {
        let steer = Steer::new();
        let its = steer.clone();
        let one = run_on(steer.backend(), |reactor| async move {
            let mut round = Round::new(reactor, its, seed).await;
            round.run().await;
            round.seen
        });
        seen.started += one.started;
        seen.died += one.died;
        seen.apart += one.apart;
        seen.refused += one.refused;
        seen.returned += one.returned;
    }
    println!("{seen:?}");
    let all = [seen.started, seen.died, seen.apart, seen.refused, seen.returned];
    assert!(all.iter().all(|count| *count > 3), "{seen:?}");
}

#[derive(Debug, Default)]
struct Seen {
    started: u32,
    /// Starts that died.
    died: u32,
    /// Starts that were refused, since each side has what the other lacks.
    apart: u32,
    /// Drives that were refused, since they were used elsewhere.
    refused: u32,
    returned: u32,
}

/// What was acknowledged, as a node of a tree: each wrote one of two blocks, of two chunks if the
/// array has as many.
type Node = usize;

const BLOCK: usize = 4096;

struct Owned {
    /// Any handle of it.
    drive: Rc<Drive>,
    uuid: [u8; 16],
    /// What it had last.
    has: Node,
    /// Somebody insisted while it was here: perhaps on the others, and that it may be filled anew.
    may_go: bool,
    /// It was there when all died in the middle of a start, or of a change of who is believed: what
    /// that gave to it alone looks as if it were used elsewhere.
    began: bool,
}

struct Round {
    seed: u64,
    prng: Prng,
    pair: Pair,
    steer: Steer,
    /// Of each node; the root is its own.
    parents: Vec<Node>,
    drives: Vec<Owned>,
    /// What the array has that runs; `None`: none does.
    now: Option<Node>,
    known: Option<Known>,
    /// Nodes that nobody was told of: they may be there or not.
    unsure: BTreeSet<Node>,
    /// Somebody insisted, so there may be two histories.
    forced: bool,
    /// A crash may leave what nobody can put right: there is none.
    is_plain: bool,
    /// There was one all the same.
    is_torn: bool,
    uuids: u8,
    steps: Vec<String>,
    seen: Seen,
}

fn spec(prng: &mut Prng) -> (ArraySpec, usize) {
    let nm = Shape { parity: 2, ..Shape::default() };
    let all = [
        (Level::Raid1, Shape::default(), 2),
        (Level::Raid1, Shape::default(), 3),
        (Level::Raid10, Shape::default(), 4),
        (Level::Raid10, Shape::default(), 6),
        (Level::Raid5, Shape::default(), 3),
        (Level::Raid6, Shape::default(), 4),
        (Level::RaidNm, nm, 3),
        (Level::RaidNm, nm, 4),
    ];
    let (level, shape, members) = all[prng.index(all.len())];
    // Members that have no part in what is written hear of nothing then.
    let is_plain = shape.parity == 2 && prng.chance(1, 2);
    let policy = is_plain.then_some(Policy::None);
    (ArraySpec { shape, policy, ..Pair::spec(level) }, members)
}

impl Round {
    async fn new(reactor: Reactor, steer: Steer, seed: u64) -> Round {
        let mut prng = Prng::from_seed(seed);
        let (spec, members) = spec(&mut prng);
        let pair = Pair::made(&reactor, &spec, &vec![DRIVE_BYTES; members], 512).await;
        let drives = pair.array.status().members.into_iter();
        let owned = |its: MemberStatus| Owned {
            drive: its.drive.unwrap(),
            uuid: its.drive_uuid,
            has: 0,
            may_go: false,
            began: false,
        };
        let drives = drives.map(owned).collect();
        let steps = vec![format!("seed {seed}: {:?} of {members}", spec.level)];
        let mut round = Round {
            seed,
            prng,
            pair,
            steer,
            parents: vec![0],
            drives,
            now: Some(0),
            known: None,
            unsure: BTreeSet::new(),
            forced: false,
            is_plain: spec.policy == Some(Policy::None),
            is_torn: false,
            uuids: 0,
            steps,
            seen: Seen::default(),
        };
        round.put().await;
        round
    }

    async fn run(&mut self) {
        for _ in 0..STEPS {
            if self.is_torn {
                break;
            }
            match self.prng.below(12) {
                0..6 => self.start().await,
                6 => self.put().await,
                7 if !self.is_plain && self.prng.chance(1, 2) => self.put_that_dies().await,
                7 => self.pull(),
                8..10 => self.give_back().await,
                10 if self.may_insist() && self.prng.chance(1, 2) => self.part().await,
                10 => self.replace().await,
                _ => self.settles().await,
            }
        }
        self.ends().await;
        if !self.forced && !self.is_torn {
            self.all_are_back().await;
        }
    }

    /// In every other round.
    fn may_insist(&self) -> bool {
        self.seed % 2 == 1
    }

    fn note(&mut self, text: String) {
        self.steps.push(text);
    }

    fn holds(&self, is_so: bool, what: &str) {
        assert!(is_so, "seed {}: {what}\n{}", self.seed, self.steps.join("\n"));
    }

    /// Whether who has `later` has all of `earlier`.
    fn is_in(&self, earlier: Node, mut later: Node) -> bool {
        while later > earlier {
            later = self.parents[later];
        }
        later == earlier
    }

    fn dies(&mut self) {
        if self.now.take().is_some() {
            self.pair.dies();
            self.note("dies".into());
        }
    }

    async fn ends(&mut self) {
        if self.is_plain && self.now.is_some() {
            self.is_torn |= self.pair.array.stop().await.is_err();
            self.known = self.pair.known();
            self.note("stops".into());
        }
        self.dies();
    }

    fn uuid(&mut self) -> [u8; 16] {
        self.uuids += 1;
        let mut uuid = [200; 16];
        uuid[0] = self.uuids;
        uuid
    }

    /// Which of our drives that is.
    fn number(&self, drive: &Rc<Drive>) -> usize {
        let file = |drive| address(self.pair.file(drive));
        self.drives.iter().position(|its| file(&its.drive) == file(drive)).unwrap()
    }

    fn members(&self) -> Vec<MemberStatus> {
        self.pair.array.status().members
    }

    /// Those that are trusted have what the array has.
    fn look(&mut self) {
        let Some(now) = self.now else { return };
        for member in self.members() {
            let drive = member.drive.filter(|drive| drive.is_alive());
            if let Some(drive) = drive.filter(|_| member.state == MemberState::Trusted) {
                let number = self.number(&drive);
                let its = &mut self.drives[number];
                (its.has, its.may_go, its.began) = (now, false, false);
            }
        }
        self.known = self.pair.known();
    }

    fn place(&self, node: Node) -> usize {
        (node % 2) * (self.pair.array.stripe_bytes() as usize - BLOCK)
    }

    /// What is to be read where this node did not write.
    fn beside(&self, node: Node) -> Node {
        let mut before = node;
        while before > 0 && before % 2 == node % 2 {
            before = self.parents[before];
        }
        before
    }

    /// The next, and what it writes.
    fn new_node(&mut self) -> Option<(Node, Buffer)> {
        self.parents.push(self.now?);
        let node = self.parents.len() - 1;
        let buffer = self.pair.reactor.buffer(BLOCK);
        buffer.copy_from_slice(&[node as u8; BLOCK]);
        Some((node, buffer))
    }

    async fn put(&mut self) {
        let Some((node, buffer)) = self.new_node() else { return };
        if self.pair.array.write(self.place(node) as u64, buffer.into()).await.is_ok() {
            self.note(format!("node {node} is written"));
            self.now = Some(node);
        } else {
            // It may have come, or not.
            self.note(format!("node {node} is not written"));
            self.unsure.insert(node);
            self.is_torn |= self.is_plain;
            self.dies();
        }
        self.look();
    }

    /// A drive goes, and all die in the middle of what comes of it and of a write.
    async fn put_that_dies(&mut self) {
        let Some((node, buffer)) = self.new_node() else { return };
        let superblocks = self.prng.below(6);
        self.let_pass(superblocks);
        self.pull();
        for member in self.members() {
            if let Some(drive) = member.drive {
                let number = self.number(&drive);
                self.drives[number].began = true;
            }
        }
        let (array, at) = (self.pair.array.clone(), self.place(node) as u64);
        let write = begin(&self.pair.reactor, async move { array.write(at, buffer.into()).await });
        while self.steer.waiting() == 0 && !write.has_ended() {
            self.pair.reactor.sleep(Duration::from_millis(1)).await;
        }
        // If all of it has come by now, this host knows what is durable.
        let mut done = None;
        if write.has_ended() {
            done = Some(write.ended(&self.pair.reactor).await);
            self.now = done.is_some_and(|done| done.is_ok()).then_some(node).or(self.now);
            self.look();
        }
        self.note(format!("node {node} is written as all die: {done:?}"));
        if done.is_none_or(|done| done.is_err()) {
            self.unsure.insert(node);
        }
        self.dies();
        self.steer.drop_waiting(&self.pair.reactor).await;
        self.seen.died += 1;
    }

    /// So many superblocks, and no more.
    fn let_pass(&mut self, superblocks: u64) {
        let left = Cell::new(superblocks);
        self.steer.set(move |_, op| match superblock(op) {
            Some(_) if left.get() == 0 => Fate::Waits,
            Some(_) => {
                left.set(left.get() - 1);
                Fate::Passes
            }
            None => Fate::Passes,
        });
    }

    fn pull(&mut self) {
        if self.now.is_some() {
            let index = self.prng.index(self.members().len());
            self.note(format!("member {index} is pulled"));
            self.pair.array.pull_member(MemberIndex::new(index)).unwrap();
        }
    }

    async fn settles(&mut self) {
        if self.now.is_some() {
            self.pair.rebuild_ends().await;
            self.look();
        }
    }

    /// A member that lacks its drive, or has one that is not up to date.
    fn a_place(&mut self) -> Option<MemberStatus> {
        self.now?;
        let mut members = self.members();
        members.retain(|its| {
            let is_here = its.drive.as_ref().is_some_and(|drive| drive.is_alive());
            !is_here || its.state == MemberState::Stale
        });
        let count = members.len();
        (count > 0).then(|| members.swap_remove(self.prng.index(count)))
    }

    /// A member's own drive comes back to the array that runs.
    async fn give_back(&mut self) {
        let Some(member) = self.a_place() else { return };
        let own = self.drives.iter().position(|its| its.uuid == member.drive_uuid);
        let Some(number) = own else { return };
        let uuid = self.uuid();
        let back = self.pair.plug_in(&self.drives[number].drive.clone());
        let done = self.pair.array.return_member(member.index, back, uuid).await;
        self.note(format!("member {} is back, drive {number}: {done:?}", member.index));
        match done {
            Ok(()) => {
                let is_in = self.is_in(self.drives[number].has, self.now.unwrap());
                self.holds(is_in || self.drives[number].may_go, "what only it had is overwritten");
                self.drives[number].may_go = true;
                self.seen.returned += 1;
            }
            Err(ChangeError::UsedElsewhere { .. }) => {
                self.seen.refused += 1;
                let is_so = self.forced || self.drives[number].began;
                self.holds(is_so, "it was used nowhere else");
            }
            Err(_) => {}
        }
        self.look();
    }

    async fn replace(&mut self) {
        let Some(member) = self.a_place().filter(|_| self.drives.len() < 6) else { return };
        let (drive, uuid) = (self.pair.new_drive().await, self.uuid());
        let done = self.pair.array.replace_member(member.index, drive.clone(), uuid).await;
        self.note(format!("member {} gets drive {}: {done:?}", member.index, self.drives.len()));
        self.drives.push(Owned { drive, uuid, has: 0, may_go: false, began: false });
        self.look();
    }

    /// All, or a few.
    fn some_drives(&mut self) -> Vec<usize> {
        let mut left: Vec<usize> = (0..self.drives.len()).collect();
        if self.prng.chance(1, 3) {
            return left;
        }
        let mut here = Vec::new();
        for _ in 0..1 + self.prng.below(4).min(left.len() as u64 - 1) {
            here.push(left.swap_remove(self.prng.index(left.len())));
        }
        here
    }

    /// With any of the drives; now and then it dies after some superblocks.
    async fn start(&mut self) {
        self.ends().await;
        if self.is_torn {
            return;
        }
        let here = self.some_drives();
        let options = AssembleOptions {
            force: self.may_insist() && self.prng.chance(1, 2),
            known: self.known.clone().filter(|_| self.prng.chance(1, 2)),
            ..AssembleOptions::default()
        };
        if self.prng.chance(1, 4) {
            return self.start_that_dies(&here, options).await;
        }
        self.start_with(&here, options).await;
        if self.prng.chance(1, 2) {
            self.put().await;
        }
    }

    /// Both of two parts of the drives are used without the other.
    async fn part(&mut self) {
        let mut drives: Vec<usize> = (0..self.drives.len()).collect();
        let one: Vec<usize> = {
            let count = 1 + self.prng.index(drives.len() - 1);
            (0..count).map(|_| drives.swap_remove(self.prng.index(drives.len()))).collect()
        };
        for part in [one, drives] {
            for left in (0..1 + self.prng.below(2)).rev() {
                self.ends().await;
                if self.is_torn {
                    return;
                }
                let force = AssembleOptions { force: true, ..AssembleOptions::default() };
                if left > 0 && self.prng.chance(1, 2) {
                    self.start_that_dies(&part, force).await;
                } else {
                    self.start_with(&part, force).await;
                    self.put().await;
                }
            }
        }
    }

    /// Who insists gives up what the others of those that are here have.
    fn insists(&mut self, here: &[usize], options: &AssembleOptions) {
        here.iter().for_each(|its| self.drives[*its].may_go |= options.force);
    }

    async fn start_that_dies(&mut self, here: &[usize], options: AssembleOptions) {
        self.forced |= options.force;
        self.insists(here, &options);
        here.iter().for_each(|its| self.drives[*its].began = true);
        let superblocks = self.prng.below(8);
        self.note(format!("by {here:?}, {options:?}, dies after {superblocks} superblocks"));
        self.let_pass(superblocks);
        let drives: Vec<Rc<Drive>> = here
            .iter()
            .map(|number| self.pair.plug_in(&self.drives[*number].drive.clone()))
            .collect();
        let (reactor, its) = (self.pair.reactor.clone(), drives.clone());
        let start = async move { Array::assemble(&reactor, its, options).await };
        let start = begin(&self.pair.reactor, start);
        while self.steer.waiting() == 0 && !start.has_ended() {
            self.pair.reactor.sleep(Duration::from_millis(1)).await;
        }
        drives.iter().for_each(|drive| drive.pull());
        self.steer.drop_waiting(&self.pair.reactor).await;
        let _ = start.ended(&self.pair.reactor).await;
        // As a host does that takes a lease: what it knew is of before.
        self.known = None;
        self.seen.died += 1;
    }

    async fn start_with(&mut self, here: &[usize], options: AssembleOptions) {
        self.forced |= options.force;
        let drives: Vec<Rc<Drive>> =
            here.iter().map(|its| self.drives[*its].drive.clone()).collect();
        let drives: Vec<&Rc<Drive>> = drives.iter().collect();
        let done = self.pair.start(&drives, options.clone()).await;
        self.note(format!("by {here:?}, {options:?}: {done:?}"));
        match done {
            Ok(()) => {
                self.insists(here, &options);
                self.judge(here, &options).await;
            }
            Err(AssembleError::Apart { .. }) => {
                self.seen.apart += 1;
                let has_begun = self.drives.iter().any(|its| its.began);
                self.holds(self.forced || has_begun, "nobody insisted, and it is apart");
            }
            Err(_) => {}
        }
    }

    /// Who wrote the block of even nodes, or of odd ones.
    async fn block(&self, node: Node) -> Option<Node> {
        let bytes = self.pair.read(self.place(node), BLOCK).await.ok()?;
        let first = bytes[0];
        self.holds(bytes.iter().all(|byte| *byte == first), "a mixture is read");
        Some(first.into())
    }

    /// The array has started with these.
    async fn judge(&mut self, here: &[usize], options: &AssembleOptions) {
        self.seen.started += 1;
        let (even, odd) = (self.block(0).await, self.block(1).await);
        let (Some(even), Some(odd)) = (even, odd) else {
            self.holds(self.forced, "it cannot be read");
            return self.pair.dies().clear();
        };
        let now = even.max(odd);
        self.note(format!("  it has nodes {even} and {odd}"));
        self.holds(self.beside(now) == even.min(odd), "what was never together is");
        self.now = Some(now);
        for member in self.members() {
            if let Some(drive) = member.drive {
                let number = self.number(&drive);
                self.drives[number].uuid = member.drive_uuid;
            }
        }
        for number in here.iter().copied() {
            let Owned { has, may_go, .. } = self.drives[number];
            let is_later = has != now && self.is_in(now, has);
            // One that was replaced is nobody's (a host with leases would ask).
            let uuid = self.drives[number].uuid;
            let is_named = self.members().iter().any(|its| its.drive_uuid == uuid);
            // What this host had last goes on, also what somebody insisted on.
            let had = |known: &Known| known.current.contains(&self.drives[number].uuid);
            let is_left = options.known.as_ref().is_some_and(|known| !had(known));
            let is_told = may_go || !is_named || self.forced && is_left;
            self.holds(is_told || !is_later, "something newer is here");
            let may_go = may_go || self.is_in(has, now);
            let is_member = |its: &MemberStatus| {
                let is_it = its.drive.as_ref().is_some_and(|its| self.number(its) == number);
                is_it && its.state != MemberState::Stale
            };
            let is_used = self.members().iter().any(is_member);
            self.holds(may_go || !is_used, "what only it has will be overwritten");
            let is_told = options.known.is_some() || !is_named;
            self.holds(may_go || is_told, "what only it has is left behind silently");
        }
        if !self.forced {
            let sure = (0..self.parents.len()).rev().find(|node| !self.unsure.contains(node));
            let newest = sure.unwrap().max(now);
            self.holds(now == newest, "it is not what was acknowledged last");
        }
        self.look();
    }

    /// Where nobody insisted all of it is there, and in agreement.
    async fn all_are_back(&mut self) {
        let here: Vec<usize> = (0..self.drives.len()).collect();
        let known = self.known.clone();
        self.start_with(&here, AssembleOptions { known, ..AssembleOptions::default() }).await;
        // Somebody has to say of one that began something whether it is to be overwritten.
        let is_asked = self.now.is_none() && self.drives.iter().any(|its| its.began);
        if is_asked {
            return;
        }
        self.holds(self.now.is_some(), "it does not start with all of its drives");
        self.pair.rebuild_ends().await;
        for index in 0..self.members().len() {
            if self.members()[index].state != MemberState::Trusted {
                self.pair.replace(index as u8).await;
                self.pair.rebuilt().await;
            }
        }
        self.pair.in_place().await;
        self.pair.scrub_is_clean().await;
        self.pair.array.stop().await.unwrap();
    }
}

//! Two hosts that reach the same drives, in one virtual time: what each has not heard yet, when it
//! has something to do, and which of them has the array.
//!
//! The first host is the one that a life begins with. The second comes while the first has the
//! array. From then on the reactor of the second leads: it runs by itself, and lets that of the
//! first run, which is beside it, as often as there is something to do for it. While the first
//! stands still nobody runs it: what its drives were given lands, and it gives them nothing more.
//!
//! Who has the array is seen by what is written: leases say who wants it, all else who has it.

use std::collections::BTreeSet;

use ashlar_raid::lease::Host;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Done;

pub const FIRST: usize = 0;
pub const SECOND: usize = 1;
const NEVER: u64 = u64::MAX;

/// By what they call themselves, two hosts that have the array in turns.
pub fn name_of(host: usize) -> Host {
    if host == 0 { Host::new([0xaa; 16], "alpha") } else { Host::new([0xbb; 16], "beta") }
}

/// How often the second host came, and what became of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contests {
    pub refused: u64,
    /// It got the array.
    pub taken: u64,
    /// And the first one has woken up since.
    pub awoken: u64,
}

/// What the drives said when the array was taken over.
#[derive(Debug, Default)]
pub struct Found {
    pub unsure: BTreeSet<u64>,
    pub bad: BTreeSet<u64>,
}

/// The second host is to come.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// So long the first stands still from now on.
    pub still_ns: u64,
    /// But only for so long once the second has the array.
    pub then_ns: u64,
}

pub struct Hosts {
    answers: [Vec<Done>; 2],
    /// When the first has something to do even if it hears nothing.
    wake_ns: u64,
    still_until_ns: u64,
    then_ns: u64,
    /// The reactor of the first, while the second leads.
    beside: Option<Reactor>,
    pub call: Option<Call>,
    /// Drives that the second finds.
    pub offered: Vec<u32>,
    pub owner: usize,
    /// The second has written leases: the first may hear of it.
    pub is_contested: bool,
    pub found: Found,
    /// The first has run since it lost the array, and has come to its end.
    pub has_awoken: bool,
    pub has_ended: bool,
}

impl Default for Hosts {
    fn default() -> Hosts {
        Hosts {
            answers: [Vec::new(), Vec::new()],
            wake_ns: NEVER,
            still_until_ns: 0,
            then_ns: 0,
            beside: None,
            call: None,
            offered: Vec::new(),
            owner: FIRST,
            is_contested: false,
            found: Found::default(),
            has_awoken: false,
            has_ended: false,
        }
    }
}

impl Hosts {
    /// The second host comes, and finds these drives. `first`: the reactor that it leads.
    pub fn contest(&mut self, now_ns: u64, call: Call, first: &Reactor, offered: Vec<u32>) {
        assert_eq!((self.owner, self.is_contested), (FIRST, false), "one comes in a life");
        self.beside = Some(first.clone());
        (self.wake_ns, self.still_until_ns) = (0, now_ns + call.still_ns);
        (self.then_ns, self.offered) = (call.then_ns, offered);
    }

    /// The second host begins to write.
    pub fn take(&mut self, now_ns: u64, found: Found) {
        (self.owner, self.found) = (SECOND, found);
        self.still_until_ns = self.still_until_ns.min(now_ns + self.then_ns);
    }

    /// The second host goes as it came.
    pub fn give_up(&mut self) {
        assert_eq!(self.owner, FIRST, "it has the array");
        self.beside = None;
    }

    /// Whether the second host is at work on what the first may still have.
    pub fn is_contest(&self) -> bool {
        self.call.is_some() || self.beside.is_some()
    }

    pub fn leads(&self, host: usize) -> bool {
        host == if self.beside.is_some() { SECOND } else { FIRST }
    }

    pub fn stands_still(&self, now_ns: u64) -> bool {
        self.beside.is_some() && now_ns < self.still_until_ns
    }

    /// It has nothing to do before that, unless it hears something.
    pub fn rests(&mut self, host: usize, until_ns: Option<u64>) {
        if host == FIRST {
            self.wake_ns = until_ns.unwrap_or(NEVER);
        }
    }

    /// When the one beside the one that leads has something to do.
    pub fn beside_at_ns(&self) -> Option<u64> {
        self.beside.as_ref()?;
        let own = if self.hears(FIRST) { 0 } else { self.wake_ns };
        Some(own.max(self.still_until_ns)).filter(|at| *at < NEVER)
    }

    /// The reactor that is to run now; it says itself when it is to run again.
    pub fn take_turn(&mut self, now_ns: u64) -> Option<Reactor> {
        self.beside_at_ns().filter(|at| *at <= now_ns)?;
        self.wake_ns = NEVER;
        self.beside.clone()
    }

    /// The first runs, and another has the array: whether that is so for the first time.
    pub fn wakes(&mut self) -> bool {
        self.owner == SECOND && !std::mem::replace(&mut self.has_awoken, true)
    }

    pub fn hears(&self, host: usize) -> bool {
        !self.answers[host].is_empty()
    }

    pub fn answer(&mut self, host: usize, done: Done) {
        self.answers[host].push(done);
    }

    pub fn hear(&mut self, host: usize, done: &mut Vec<Done>) {
        done.append(&mut self.answers[host]);
    }
}
